"""``memfit replay``: traffic before a guard, without a model in memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from memfit.cli.commands.plan.subject import TRAFFIC, sized_for_mlx_lm
from memfit.cli.exits import Exit
from memfit.cli.options.groups import OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import AdaptedModel, MachineOptions, VersionOptions
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_size
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.questions.target import RuntimeQuestion

if TYPE_CHECKING:
    from memfit.estimators.base.reading.request_trace import TraceRequest


class ReplayOptions(OptionGroup, frozen=True, kw_only=True):
    """The traffic, and the settings of the server."""

    panel = "Replay options"
    traffic: Path | None = TRAFFIC
    generate: Literal["agents", "uniform"] | None = option(
        help="Generate the traffic: turns of conversations with wide ones among them, or any."
    )
    requests: int = option(help="With --generate: how many.", default=120, min=1, max=20_000)
    seed: int = option(help="With --generate: of its random numbers.", default=1)
    clients: int = option(
        help="Clients that send one request after the other, where the traffic has no times.",
        default=8,
        min=1,
        max=1024,
    )
    limit: int | None = option(
        metavar="SIZE",
        help="Bytes that may be in use; by default the working set of the machine less the margin.",
        read=parse_size,
    )
    prefill_step_size: int = option(help="Tokens in a prefill chunk.", default=2048)
    prompt_concurrency: int = option(help="Prompts prefilled together.", default=8, min=1, max=256)
    decode_concurrency: int = option(
        help="Requests that decode together.", default=32, min=1, max=1024
    )
    prompt_cache_size: int = option(help="Caches kept for later requests.", default=10, min=0)

    @property
    def traffic_text(self) -> str:
        """What the traffic is."""
        return str(self.traffic or f"{self.requests} generated requests ({self.generate})")

    @property
    def server(self) -> ServerSettings:
        """A server with these flags."""
        return ServerSettings(
            prefill_step=self.prefill_step_size,
            prompt_concurrency=self.prompt_concurrency,
            decode_concurrency=self.decode_concurrency,
            prompt_cache_size=self.prompt_cache_size,
        )


@grouped
def replay(
    model: AdaptedModel,
    options: ReplayOptions,
    machine: MachineOptions,
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """Show which requests a guard starts, lets wait or refuses.

    The traffic is recorded or generated, and no model is loaded. MODEL is a model or its memory
    card, a .json file that memfit card wrote. A row of the traffic may have max_tokens and session
    beside prompt_tokens and completion_tokens.
    """
    from memfit.estimators.guard.opening import open_guard
    from memfit.estimators.guard.replay import replay as replayed

    rows = _recorded(options)
    device = machine.machine()
    if options.limit is None and device is None:
        raise InputError("name the machine: --device m4-max-64, or --limit 20GB")
    question = RuntimeQuestion(mlx_version=versions.mlx_version)
    guard = open_guard(
        model.reference(),
        lambda: sized_for_mlx_lm(model, device, question, verbose=output.verbose),
        options.server,
        limit_bytes=options.limit,
        device=device,
    )
    requests, times = rows or (_generated(options, guard.tables.max_tokens), ())
    result = replayed(
        guard,
        requests,
        traffic=options.traffic_text,
        clients=options.clients,
        times=times,
        prompt_cache_size=options.prompt_cache_size,
    )
    output.write(result, units=output.units, plot=output.draws(False))
    raise typer.Exit(Exit.NO if result.over or result.refused_though_fits else Exit.YES)


def _recorded(
    options: ReplayOptions,
) -> "tuple[tuple[TraceRequest, ...], tuple[tuple[float, float], ...]] | None":
    from memfit.estimators.base.reading.request_trace import read_timed_trace

    if (options.traffic is None) == (options.generate is None):
        raise InputError("give --traffic FILE, or --generate agents")
    return read_timed_trace(options.traffic) if options.traffic else None


def _generated(options: ReplayOptions, longest: int) -> "tuple[TraceRequest, ...]":
    from random import Random

    from memfit.estimators.guard.traffic import generated

    assert options.generate
    return generated(options.generate, Random(options.seed), options.requests, longest)
