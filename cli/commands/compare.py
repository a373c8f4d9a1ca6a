"""``memfit compare``: compare models side by side, or over combinations of settings."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.option_values import (
    named_device,
    requested_device,
    requested_quantization,
    requested_runtime,
    requested_workload,
)
from memfit.cli.options import (
    DEFAULT_MARGIN,
    Batch,
    ChosenRuntime,
    CompareForm,
    CompareFormat,
    Context,
    DeviceName,
    GroupSize,
    Json,
    KVBits,
    KVGroupSize,
    Margin,
    MaxKVSize,
    MaxTokens,
    Memory,
    Output,
    PrefillStep,
    PromptTokens,
    Quantize,
    QuantizedKVStart,
    QuantMode,
    Regime,
    ShownUnits,
    Verbose,
    WorkingSet,
    parsed,
)
from memfit.cli.progress import reporting
from memfit.cli.render.output import deliver
from memfit.estimators.base.errors import InputError, UnreachableError
from memfit.estimators.base.units import Units, parse_size
from memfit.estimators.machine.working_set import DEFAULT_REGIME, OsRegime
from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME

if TYPE_CHECKING:
    from memfit.estimators.compare.axes import MatrixAxis
    from memfit.estimators.compare.compare import ComparedModel
    from memfit.estimators.results.comparison import Comparison


def compare(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Two or more models; with --matrix one is enough."),
    ],
    matrix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=A,B",
            help="Vary context, max-tokens, batch, prefill-step, kv-bits, quantize, device or"
            " memory, such as context=4k,32k or kv-bits=none,8; repeat for more axes.",
        ),
    ] = None,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    max_tokens: MaxTokens = None,
    batch: Batch = 1,
    prefill_step: PrefillStep = None,
    kv_bits: KVBits = None,
    kv_group_size: KVGroupSize = None,
    quantized_kv_start: QuantizedKVStart = None,
    max_kv_size: MaxKVSize = None,
    quantize: Quantize = None,
    group_size: GroupSize = None,
    quant_mode: QuantMode = None,
    device: DeviceName = None,
    memory: Memory = None,
    working_set: WorkingSet = None,
    os_regime: Regime = DEFAULT_REGIME,
    runtime: ChosenRuntime = None,
    runtimes: Annotated[
        str | None,
        typer.Option(metavar="all|A,B", help="Compare one model under several runtimes."),
    ] = None,
    margin: Margin = DEFAULT_MARGIN,
    format_: CompareForm = CompareFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Compare models side by side, and show what fits where.

    Each model is compared with the first.
    """
    # The library is imported here so that --help stays fast.
    from memfit.cli.render.views.compare import ComparisonView
    from memfit.estimators.base.files import printable
    from memfit.estimators.compare.axes import Scenario
    from memfit.estimators.compare.compare import ComparedModel
    from memfit.estimators.compare.compare import compare as answer
    from memfit.estimators.results.comparison import try_or_reason
    from memfit.estimators.sizing.catalog import Catalog

    axes = _axes(matrix or [], os_regime)
    if len(models) < 2 and not axes and runtimes is None:
        raise InputError("give two or more models to compare, or one with --matrix or --runtimes")
    if len(models) > 1 and runtimes is not None:
        raise InputError("--runtimes compares one model under several runtimes: give one model")
    machine = any(value is not None for value in (device, memory, working_set))
    _reject_twice(
        {axis.name for axis in axes},
        {
            "context": context is not None or prompt_tokens is not None,
            "max-tokens": max_tokens is not None,
            "batch": batch != 1,
            "prefill-step": prefill_step is not None,
            "kv-bits": kv_bits is not None,
            "quantize": quantize is not None,
            "device": machine,
            "memory": machine,
        },
    )
    base = Scenario(
        requested_workload(
            context=context,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            batch=batch,
            prefill_step=prefill_step,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            quantized_kv_start=quantized_kv_start,
            max_kv_size=max_kv_size,
        ),
        requested_device(device, memory, working_set, os_regime),
        requested_quantization(quantize, group_size, quant_mode),
        parsed("--margin", parse_size, margin) or 0,
    )
    rules = requested_runtime(runtime or DEFAULT_RUNTIME)
    base.workload.under(rules)
    with reporting(verbose=verbose) as progress:
        catalog = Catalog(progress=progress)
        for reference in models:
            try_or_reason(partial(catalog.checkpoint, reference))
    compared = [ComparedModel(printable(reference), reference) for reference in models]
    if runtimes is not None:
        compared = _under_each(compared[0], runtimes)
    given = None if runtime is None and runtimes is None else rules
    result = answer(catalog, compared, base, axes, runtime=given, units=units)
    view = ComparisonView(result, units, runtimes is not None)
    deliver(view, "json" if json_ else format_.value, output)
    raise typer.Exit(Exit.YES if _any_will_do(runtimes, result) else _code(result))


def _axes(texts: Sequence[str], regime: OsRegime) -> "list[MatrixAxis]":
    from memfit.estimators.compare.axes import parse_axis

    def read(text: str) -> "MatrixAxis":
        return parse_axis(
            text, find_device=lambda name: named_device(name, regime), os_regime=regime
        )

    return [axis for text in texts if (axis := parsed("--matrix", read, text))]


def _under_each(model: "ComparedModel", names: str) -> "list[ComparedModel]":
    """The model under each of the runtimes, which share what was read and sized."""
    from memfit.estimators.runtimes.registry import runtime_names

    wanted = [name.strip() for name in names.split(",")]
    if wanted == ["all"]:
        wanted = list(runtime_names())
    if len(set(wanted)) < len(wanted):
        raise InputError(f"--runtimes {names[:60]}: a runtime is given twice")
    return [replace(model, label=name, runtime=requested_runtime(name)) for name in wanted]


def _any_will_do(runtimes: str | None, result: "Comparison") -> bool:
    """Not every runtime can run every model: one that can is enough."""
    return runtimes == "all" and any(model.undecided is None for model in result.models)


def _reject_twice(axes: set[str], options: dict[str, bool]) -> None:
    """An axis would override the option for the same setting."""
    for name, given in options.items():
        if given and name in axes:
            raise InputError(f"--matrix {name}: an option also sets {name}; give one of them")


def _code(result: "Comparison") -> Exit:
    """A comparison is no verdict: the code is 0 unless something has no figure."""
    slugs = {undecided.slug for undecided in result.undecided}
    if UnreachableError.slug in slugs:
        return Exit.UNREACHABLE
    return Exit.UNSUPPORTED if slugs else Exit.YES
