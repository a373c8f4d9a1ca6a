"""``memfit plan server``: what a server takes at most, and the flags that fit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.commands.plan.subject import TRAFFIC, sized_for_mlx_lm, sized_model
from memfit.cli.exits import exit_of_verdict
from memfit.cli.options.groups import Only, PlanOutput, grouped, option
from memfit.cli.options.program_line import ProgramLine
from memfit.cli.options.questions import (
    CONTEXT,
    IMAGES,
    AssumableModel,
    EstimateRuntime,
    RankedMachine,
    WorkloadOptions,
)
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import parse_count, parse_server_size
from memfit.estimators.sizing.sized_model import require_loaded

if TYPE_CHECKING:
    from memfit.estimators.base.workload import ServerSettings, Workload
    from memfit.estimators.mlx.arrivals import ServedRequest
    from memfit.estimators.results.server import ServerPlan
    from memfit.estimators.sizing.sized_model import SizedModel

_MOST_AT_ONCE = 1024


class ServerOptions(ProgramLine, frozen=True, kw_only=True):
    """The flags of mlx_lm.server or, with images, of mlx_vlm.server, and its requests."""

    panel = "Server options"
    prefill_step_size: int = option(help="Tokens in a prefill chunk.", default=2048)
    max_tokens: int = option(
        help="Tokens that each request generates.", default=512, read=parse_count
    )
    prompt_concurrency: int | None = option(help="Prompts prefilled together; 8 by default.")
    decode_concurrency: int | None = option(help="Requests that decode together; 32 by default.")
    prompt_cache_size: int | None = option(help="Caches kept for later requests; 10 by default.")
    prompt_cache_bytes: int | None = option(
        metavar="SIZE", help="The server's limit of those caches.", read=parse_server_size
    )
    max_num_seqs: int | None = option(help="With --image: requests taken out of the queue.")
    vision_cache_size: int | None = option(
        help="With --image: images with kept features; 20 by default."
    )
    clients: int | None = option(
        help="Requests open at a time; by default what decodes together, with --image 8."
    )
    traffic: Path | None = TRAFFIC

    def settings(self, *, images: bool) -> "ServerSettings":
        """Return the flags of the server for prompts with images, or without.

        Raises:
            InputError: when one is out of range, or of the other server.
        """
        from memfit.estimators.base.workload import ServerSettings

        text = ("prompt_concurrency", "decode_concurrency", "prompt_cache_size")
        seen = ("max_num_seqs", "vision_cache_size")
        for name in (*text, "prompt_cache_bytes", "traffic") if images else seen:
            if getattr(self, name) is not None:
                server = "mlx_lm.server, which takes no images" if images else "mlx_vlm.server"
                raise InputError(f"{setting(name)} is for {server}; leave it out")
        given = {
            name: value for name in (*text, *seen) if (value := getattr(self, name)) is not None
        }
        counts = {**given, "prefill_step_size": self.prefill_step_size}
        if self.clients is not None:
            counts["clients"] = self.clients
        for name, value in counts.items():
            least = 0 if name == "prompt_cache_size" else 1
            most = 2**30 if name == "prefill_step_size" else _MOST_AT_ONCE
            if not least <= value <= most:
                raise InputError(f"{setting(name)} {value}: give from {least} to {most}")
        return ServerSettings(
            prefill_step=self.prefill_step_size,
            prompt_cache_bytes=self.prompt_cache_bytes,
            **given,
        )

    def recorded(self) -> "tuple[tuple[ServedRequest, ...], tuple[tuple[float, float], ...]]":
        """Return the requests of the file, and their times where it has them.

        Raises:
            InputError: when it cannot be read.
        """
        from memfit.estimators.base.reading.request_trace import read_timed_trace
        from memfit.estimators.mlx.arrivals import ServedRequest

        rows, times = read_timed_trace(self.traffic) if self.traffic else ((), ())
        # The server generates at least one token.
        requests = (ServedRequest(row.prompt_tokens, max(1, row.completion_tokens)) for row in rows)
        return tuple(requests), times


@grouped
def server(
    model: AssumableModel,
    options: ServerOptions,
    workload: Annotated[
        WorkloadOptions, Only(*CONTEXT, "kv_bits", "kv_group_size", "quantized_kv_start", *IMAGES)
    ],
    machine: RankedMachine,
    runtime: Annotated[EstimateRuntime, Only("mlx_version", "mlx_lm_version", "method")],
    output: PlanOutput,
) -> None:
    """Show the most that mlx_lm.server takes, and the flags that fit.

    With --image it is mlx_vlm.server, with an upper bound.
    """
    from msgspec.structs import replace

    from memfit.estimators.questions.target import MARGIN_BYTES
    from memfit.estimators.sizing.ranks import RankedModel
    from memfit.estimators.sizing.resolved import resolved

    images = workload.has_images
    options.require_images(images)
    question = (options.settings(images=images), options.recorded(), options.clients)
    sizes = sized_model if images else sized_for_mlx_lm
    sized = sizes(
        model, machine.first_machine(), runtime, verbose=output.verbose, margin_bytes=MARGIN_BYTES
    )
    target = resolved(
        require_loaded(sized),
        workload,
        machine.over(),
        keeps_runtime=False,
        deciding=RankedModel.full_first,
    )
    run = replace(target.workload, max_tokens=options.max_tokens)
    result = replace(_planned(target.sized, run, *question), program=options.shown)
    plot = output.draws(False)
    output.write(result, units=output.units, plot=plot, as_type=model.as_type)
    raise typer.Exit(exit_of_verdict(result.verdict, is_requested=result.device is not None))


def _planned(
    sized: "SizedModel",
    run: "Workload",
    settings: "ServerSettings",
    recorded: "tuple[tuple[ServedRequest, ...], tuple[tuple[float, float], ...]]",
    clients: int | None,
) -> "ServerPlan":
    from memfit.estimators.plans.server.images import PREFILLED, plan_image_server
    from memfit.estimators.plans.server.plan import plan_server

    if run.images:
        clients = clients or settings.max_num_seqs or PREFILLED
        return plan_image_server(sized, run, settings, clients=clients)
    traffic, times = recorded
    return plan_server(sized, run, settings, clients=clients, traffic=traffic, times=times)
