"""``memfit plan server``: the worst moment of mlx_lm.server, and the flags that fit."""

from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.commands.plan.subject import AssumablePlanModel, Traffic
from memfit.cli.exits import Exit
from memfit.cli.options.estimate import MethodOption
from memfit.cli.options.groups import Only, OptionGroup, grouped, parsed
from memfit.cli.options.output import PlanOutput
from memfit.cli.options.ranks import RankedMachine
from memfit.cli.options.runtime import VersionOptions
from memfit.cli.options.workload import CONTEXT, WorkloadOptions
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import parse_count, parse_size

if TYPE_CHECKING:
    from memfit.estimators.plans.server.batch_schedule import Request
    from memfit.estimators.results.server import ServerSettings

_MOST_AT_ONCE = 1024


class ServerOptions(OptionGroup, frozen=True, kw_only=True):
    """The flags of mlx_lm.server, by its own names, and its requests."""

    panel = "Server options"
    prefill_step_size: Annotated[int, typer.Option(help="Tokens in a prefill chunk.")] = 2048
    max_tokens: Annotated[str, typer.Option(help="Tokens that each request generates.")] = "512"
    prompt_concurrency: Annotated[int, typer.Option(help="Prompts prefilled together.")] = 8
    decode_concurrency: Annotated[int, typer.Option(help="Requests that decode together.")] = 32
    prompt_cache_size: Annotated[int, typer.Option(help="Caches kept for later requests.")] = 10
    prompt_cache_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The server's limit of those caches.")
    ] = None
    clients: Annotated[
        int | None,
        typer.Option(help="Requests open at a time; by default twice what can run together."),
    ] = None
    traffic: Traffic = None
    method: MethodOption = "auto"
    image: Annotated[list[str] | None, typer.Option(hidden=True)] = None
    video: Annotated[list[str] | None, typer.Option(hidden=True)] = None

    def settings(self) -> "ServerSettings":
        """Return the flags.

        Raises:
            InputError: when one is out of range.
            UnsupportedError: with images, which mlx_lm.server does not take.
        """
        from memfit.estimators.results.server import ServerSettings

        if self.image or self.video:
            # mlx_vlm/server/generation.py: a batch generator, queues and prompt caches of its own.
            raise UnsupportedError(
                "mlx_lm.server takes no images; mlx_vlm.server, which does, has batches and caches"
                " that are not described: memfit plan context --image has one request at a time"
            )
        for name, least in (
            ("prefill_step_size", 1),
            ("prompt_concurrency", 1),
            ("decode_concurrency", 1),
            ("prompt_cache_size", 0),
            ("clients", 1),
        ):
            value = getattr(self, name)
            most = 2**30 if name == "prefill_step_size" else _MOST_AT_ONCE
            if value is not None and not least <= value <= most:
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option} {value}: give from {least} to {most}")
        return ServerSettings(
            prefill_step=self.prefill_step_size,
            prompt_concurrency=self.prompt_concurrency,
            decode_concurrency=self.decode_concurrency,
            prompt_cache_size=self.prompt_cache_size,
            prompt_cache_bytes=parsed("--prompt-cache-bytes", parse_size, self.prompt_cache_bytes),
        )

    def recorded(self) -> "tuple[Request, ...]":
        """Return the requests of the file.

        Raises:
            InputError: when it cannot be read.
        """
        from memfit.estimators.base.reading.request_trace import read_request_trace
        from memfit.estimators.plans.server.batch_schedule import Request

        rows = read_request_trace(self.traffic) if self.traffic else ()
        # The server generates at least one token.
        return tuple(Request(row.prompt_tokens, max(1, row.completion_tokens)) for row in rows)


@grouped
def server(
    model: AssumablePlanModel,
    asked: ServerOptions,
    workload: Annotated[
        WorkloadOptions, Only(*CONTEXT, "kv_bits", "kv_group_size", "quantized_kv_start")
    ],
    machine: RankedMachine,
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """Show the worst moment of mlx_lm.server, and the flags that fit."""
    # The library is imported here so that --help stays fast.
    from msgspec.structs import replace

    from memfit.cli.render.views.server import to_document
    from memfit.estimators.plans.server.plan import plan_server
    from memfit.estimators.sizing.workload import MARGIN_BYTES

    settings, traffic = asked.settings(), asked.recorded()
    sized = model.sized_for_mlx_lm(
        machine.chosen(),
        verbose=output.verbose,
        method=asked.method,
        versions=versions,
        margin_bytes=MARGIN_BYTES,
    )
    run = workload.partial().under(sized.runtime_model.runtime)
    sized = machine.full_first(sized, run)
    run = replace(run, max_tokens=parsed("--max-tokens", parse_count, asked.max_tokens))
    clients = asked.clients or 2 * settings.rows
    result = plan_server(sized, run, settings, clients=clients, traffic=traffic, units=output.units)
    output.write(model.answer(result, to_document(result, output.units, plot=output.draws(False))))
    raise typer.Exit(Exit.NO if result.verdict == "exceeds" else Exit.YES)
