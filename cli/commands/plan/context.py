"""``memfit plan context``: the contexts that fit for a number of requests, by runtime."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.commands.plan.subject import Model, open_sized
from memfit.cli.exits import Exit
from memfit.cli.option_values import (
    requested_device,
    requested_quantization,
    requested_runtime,
    requested_workload,
)
from memfit.cli.options import (
    DEFAULT_MARGIN,
    Batch,
    ChosenRuntime,
    Context,
    DeviceName,
    GroupSize,
    Json,
    KVBits,
    KVGroupSize,
    Margin,
    Memory,
    Output,
    PlanForm,
    PlanFormat,
    PrefillStep,
    Quantize,
    QuantizedKVStart,
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

if TYPE_CHECKING:
    from memfit.estimators.plans.context.plan import ContextQuestion

_MAX_VALUES = 64


def context(
    model: Model,
    context: Context = None,
    batch: Batch = 1,
    prefill_step: PrefillStep = None,
    kv_bits: KVBits = None,
    kv_group_size: KVGroupSize = None,
    quantized_kv_start: QuantizedKVStart = None,
    contexts: Annotated[
        str | None, typer.Option(metavar="A,B", help="Contexts in the table, such as 8k,32k.")
    ] = None,
    requests: Annotated[
        str | None, typer.Option(metavar="A,B", help="Numbers of concurrent requests in the table.")
    ] = None,
    ceiling: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Longest context to plan.")
    ] = None,
    backend_cap: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Longest context that the backend allows.")
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded requests, CSV or JSONL with prompt_tokens and completion_tokens.",
        ),
    ] = None,
    quantize: Quantize = None,
    group_size: GroupSize = None,
    quant_mode: QuantMode = None,
    device: DeviceName = None,
    memory: Memory = None,
    working_set: WorkingSet = None,
    os_regime: Regime = DEFAULT_REGIME,
    runtime: ChosenRuntime = None,
    margin: Margin = DEFAULT_MARGIN,
    plot: Annotated[bool, typer.Option("--plot", help="Draw memory against context.")] = False,
    format_: PlanForm = PlanFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Show the contexts that fit, and how many requests at once.

    The context that the runtime itself would choose is shown too.
    """
    # The library is imported here so that --help stays fast.
    from memfit.cli.render.output import deliver
    from memfit.cli.render.view import Answer
    from memfit.cli.render.views.context import to_document
    from memfit.estimators.plans.context.plan import plan_context
    from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME
    from memfit.estimators.sizing.estimate import curve

    asked = _asked(contexts, requests, ceiling, backend_cap, traffic)
    rules = requested_runtime(runtime or DEFAULT_RUNTIME)
    machine = requested_device(device, memory, working_set, os_regime)
    sized = open_sized(
        model,
        machine,
        requested_quantization(quantize, group_size, quant_mode),
        verbose=verbose,
        method="formula",  # hundreds of workloads are sized: a trace of each takes too long
        margin_bytes=parsed("--margin", parse_size, margin) or 0,
    )
    if runtime is None:
        rules = requested_runtime(sized.runtime)
    workload = requested_workload(
        context=context,
        prompt_tokens=None,
        max_tokens=None,
        batch=batch,
        prefill_step=prefill_step,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        max_kv_size=None,
    ).under(rules)
    sized = sized.with_runtime(rules)
    result = plan_context(sized, workload, asked, units=units)
    document = to_document(result, units, curve(sized, workload) if plot else ())
    deliver(Answer(result, document), "json" if json_ else format_.value, output)
    raise typer.Exit(Exit.NO if result.verdict == "exceeds" else Exit.YES)


def _asked(
    contexts: str | None,
    requests: str | None,
    ceiling: str | None,
    backend_cap: str | None,
    traffic: Path | None,
) -> "ContextQuestion":
    from memfit.estimators.base.reading.request_trace import read_request_trace
    from memfit.estimators.plans.context.plan import (
        CONTEXTS,
        MAX_REQUESTS,
        REQUESTS,
        ContextQuestion,
    )

    lengths = parsed("--contexts", _counts, contexts) or CONTEXTS
    at_once = parsed("--requests", _counts, requests) or REQUESTS
    if max(at_once) > MAX_REQUESTS:
        raise InputError(f"--requests {max(at_once)}: give at most {MAX_REQUESTS}")
    return ContextQuestion(
        contexts=lengths,
        requests=at_once,
        ceiling=parsed("--ceiling", _positive, ceiling),
        backend_cap=parsed("--backend-cap", _positive, backend_cap),
        traffic=read_request_trace(traffic) if traffic else (),
    )


def _counts(text: str) -> tuple[int, ...]:
    """Read a list of counts; return them ascending and each once."""
    found = {_positive(part) for part in text.split(",")}
    if len(found) > _MAX_VALUES:
        raise InputError(f"{len(found)} values: give at most {_MAX_VALUES}")
    return tuple(sorted(found))


def _positive(text: str) -> int:
    value = parse_count(text)
    if value < 1:
        raise InputError(f"{text!r}: must be at least 1")
    return value
