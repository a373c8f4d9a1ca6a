"""``memfit plan growth``: sessions that grow token by token, under the rule of each runtime."""

from typing import Annotated

import typer

from memfit.cli.commands.plan.subject import Model, open_sized
from memfit.cli.exits import Exit
from memfit.cli.option_values import requested_device, requested_quantization, requested_runtime
from memfit.cli.options import (
    DeviceName,
    GroupSize,
    Json,
    Memory,
    Output,
    PlanForm,
    PlanFormat,
    Quantize,
    QuantMode,
    Regime,
    ShownUnits,
    Verbose,
    WorkingSet,
    parsed,
)
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units, parse_count, parse_size
from memfit.estimators.machine.working_set import DEFAULT_REGIME

_DEFAULT_TOKENS = "32k"


def growth(
    model: Model,
    tokens: Annotated[
        str | None,
        typer.Option(help="Final length of a session without turns (32k)."),
    ] = None,
    sessions: Annotated[int, typer.Option(help="Sessions at once.")] = 1,
    turns: Annotated[int | None, typer.Option(help="Turns of each session.")] = None,
    turn_tokens: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Tokens that a turn adds, question and answer."),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Tokens that all sessions begin with.")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="Capacity of a contiguous cache; by default the length of a session."),
    ] = None,
    runtimes: Annotated[
        str, typer.Option("--runtimes", "--runtime", metavar="all|A,B", help="Runtimes to show.")
    ] = "all",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for all caches; by default 90 % of the working set minus the weights.",
        ),
    ] = None,
    quantize: Quantize = None,
    group_size: GroupSize = None,
    quant_mode: QuantMode = None,
    device: DeviceName = None,
    memory: Memory = None,
    working_set: WorkingSet = None,
    os_regime: Regime = DEFAULT_REGIME,
    plot: Annotated[bool, typer.Option("--plot", help="Draw caches over the turns.")] = False,
    format_: PlanForm = PlanFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Show what sessions allocate and copy as they grow.

    Also where they exceed a budget.
    """
    # The library is imported here so that --help stays fast.
    from memfit.cli.render.output import deliver
    from memfit.cli.render.view import Answer
    from memfit.cli.render.views.growth import to_document
    from memfit.estimators.plans.sessions.plan import plan_growth
    from memfit.estimators.results.growth import Sessions
    from memfit.estimators.runtimes.registry import runtime_names

    lengths = _lengths(tokens, turns, turn_tokens, prefix)
    asked = Sessions(sessions=sessions, **lengths)
    names = runtime_names() if runtimes == "all" else runtimes.split(",")
    rules = [requested_runtime(name.strip()) for name in names]
    machine = requested_device(device, memory, working_set, os_regime)
    conversion = requested_quantization(quantize, group_size, quant_mode)
    sized = open_sized(model, machine, conversion, verbose=verbose, method="formula")
    left = parsed("--budget", parse_size, budget)
    if left is None and machine is not None:
        left = max(0, machine.working_set_bytes * 9 // 10 - sized.resident_bytes)
    result = plan_growth(
        sized.model,
        sized.checkpoint.id,
        asked,
        rules,
        budget_bytes=left,
        context=parsed("--context", parse_count, context),
    )
    document = to_document(result, units, plot=plot)
    deliver(Answer(result, document), "json" if json_ else format_.value, output)
    if not result.rules:
        raise typer.Exit(Exit.UNSUPPORTED)
    crossed = all(rule.crossing for rule in result.rules)
    raise typer.Exit(Exit.NO if crossed else Exit.YES)


def _lengths(
    tokens: str | None, turns: int | None, turn_tokens: str | None, prefix: str | None
) -> dict[str, int]:
    """The length of a session: in one turn, or in turns after a prefix."""
    start = parsed("--prefix", parse_count, prefix) or 0
    if turns is None and turn_tokens is None:
        end = parsed("--tokens", parse_count, tokens or _DEFAULT_TOKENS) or 0
        if start >= end:
            raise InputError(f"--prefix {start}: must be below the session's {end} tokens")
        return {"prefix_tokens": start, "turns": 1, "turn_tokens": end - start}
    if tokens is not None or turns is None or turn_tokens is None:
        raise InputError("give --tokens, or --turns with --turn-tokens")
    each = parsed("--turn-tokens", parse_count, turn_tokens) or 0
    return {"prefix_tokens": start, "turns": turns, "turn_tokens": each}
