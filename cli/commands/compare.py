"""``memfit compare``: compare models side by side, or over combinations of settings."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer
from msgspec.structs import replace

from memfit.cli.exits import Exit
from memfit.cli.options.completion import complete_model
from memfit.cli.options.groups import OptionGroup, TabularOutput, argument, grouped, option
from memfit.cli.options.questions import Conversion, RankedMachine, RuntimeOptions, WorkloadOptions
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import InputError, UnreachableError
from memfit.estimators.base.progress import Progress
from memfit.estimators.questions.question import WorkloadQuestion, read_setting
from memfit.estimators.questions.target import (
    MachineQuestion,
    ModelQuestion,
    RuntimeQuestion,
    named_runtime,
)

if TYPE_CHECKING:
    from memfit.estimators.compare.axes import MatrixAxis
    from memfit.estimators.compare.compare import ComparedModel
    from memfit.estimators.results.comparison import Comparison
    from memfit.estimators.runtimes.runtime import Runtime
    from memfit.estimators.sizing.catalog import Catalog
    from memfit.estimators.sizing.resolved import TargetQuestion


class CompareOptions(OptionGroup, frozen=True, kw_only=True):
    """The models, or what is compared in place of them."""

    models: list[str] | None = argument(
        metavar="MODEL...",
        help="Two or more models; with --matrix one is enough.",
        show_default=False,
        autocompletion=complete_model,
    )
    more: list[str] | None = option(
        *("--model", "-m", "--hf-path", "-hf"),
        rich_help_panel="Model options",
        metavar="MODEL",
        help="The same, as an option; repeat for more.",
        autocompletion=complete_model,
    )
    matrix: list[str] | None = option(
        metavar="AXIS=A,B",
        help="Vary context, max-tokens, batch, prefill-step, kv-bits, quantize, device or"
        " memory, such as context=4k,32k or kv-bits=none,8; repeat for more axes.",
    )
    runtimes: str | None = option(
        metavar="all|A,B", help="Compare one model under several runtimes."
    )
    plot: bool = option(
        "--plot", help="Draw what each model needs; with --matrix every combination.", default=False
    )

    def references(self) -> list[str]:
        """Return what names the models."""
        return [*(self.models or ()), *(self.more or ())]


@grouped
def compare(
    conversion: Conversion,
    options: CompareOptions,
    workload: WorkloadOptions,
    machine: RankedMachine,
    runtime: RuntimeOptions,
    output: TabularOutput,
) -> None:
    """Compare models side by side, and show what fits where.

    Each model is compared with the first.
    """
    from memfit.estimators.compare.compare import compare as answer

    axes = _axes(options.matrix or [], machine)
    references = options.references()
    _reject_wrong_number(len(references), options, axes)
    _reject_twice({axis.name for axis in axes}, conversion, workload, machine)
    base = _question(conversion, workload, machine, runtime)
    # Of several runtimes only some keep a number of experts.
    rules = (replace(runtime, capacity=None) if options.runtimes else runtime).chosen()
    with reporting(verbose=output.verbose) as progress:
        catalog = _opened(references, runtime, progress)
    result = answer(
        catalog,
        _compared(references, options.runtimes, runtime),
        base,
        axes,
        runtime=None if runtime.runtime is None and options.runtimes is None else rules,
    )
    plot, by_runtime = output.draws(options.plot), options.runtimes is not None
    output.write(result, units=output.units, by_runtime=by_runtime, plot=plot)
    raise typer.Exit(Exit.YES if _any_will_do(options.runtimes, result) else _code(result))


def _axes(texts: Sequence[str], machine: MachineQuestion) -> "list[MatrixAxis]":
    from memfit.estimators.compare.axes import parse_axis

    read = partial(parse_axis, find_device=machine.named, os_regime=machine.os_regime)
    return [read_setting("matrix", read, text) for text in texts]


def _reject_wrong_number(
    models: int, options: CompareOptions, axes: "Sequence[MatrixAxis]"
) -> None:
    if not models:
        raise InputError("MODEL is missing; name two or more models to compare")
    if models < 2 and not axes and options.runtimes is None:
        raise InputError("give two or more models to compare, or one with --matrix or --runtimes")
    if models > 1 and options.runtimes is not None:
        raise InputError("--runtimes compares one model under several runtimes: give one model")


def _reject_twice(
    axes: set[str], model: ModelQuestion, workload: WorkloadQuestion, machine: MachineQuestion
) -> None:
    """An axis would override the option for the same setting."""
    options = {
        "context": (workload.context, workload.prompt_tokens) != (None, None),
        "max-tokens": workload.max_tokens is not None,
        "batch": workload.batch != 1,
        "prefill-step": workload.prefill_step is not None,
        "kv-bits": workload.kv_bits is not None,
        "quantize": model.quantization() is not None,
        "device": machine.is_named,
        "memory": machine.is_named,
    }
    for name, given in options.items():
        if given and name in axes:
            raise InputError(f"--matrix {name}: an option also sets {name}; give one of them")


def _question(
    model: ModelQuestion,
    workload: WorkloadQuestion,
    machine: MachineQuestion,
    runtime: RuntimeQuestion,
) -> "TargetQuestion":
    from memfit.estimators.sizing.resolved import TargetQuestion

    return TargetQuestion(
        workload=workload,
        device=machine.first_machine(),
        quantize=model.quantization(),
        margin_bytes=runtime.margin,
        ranks=machine.over(),
        as_type=model.as_type,
        adapter=model.adapter,
        draft=model.drafting(),
    )


def _opened(references: Sequence[str], runtime: RuntimeQuestion, progress: Progress) -> "Catalog":
    """Return a catalog with the checkpoints; errors are raised again where they are used."""
    from memfit.estimators.results.comparison import try_or_reason
    from memfit.estimators.sizing.catalog import Catalog

    catalog = Catalog(progress=progress, versioned=runtime.versioned)
    for reference in references:
        try_or_reason(partial(catalog.checkpoint, reference))
    return catalog


def _compared(
    references: Sequence[str], runtimes: str | None, runtime: RuntimeQuestion
) -> "list[ComparedModel]":
    from memfit.estimators.base.files import printable
    from memfit.estimators.compare.compare import ComparedModel

    compared = [ComparedModel(printable(reference), reference) for reference in references]
    return compared if runtimes is None else _under_each(compared[0], runtimes, runtime)


def _under_each(
    model: "ComparedModel", names: str, runtime: RuntimeQuestion
) -> "list[ComparedModel]":
    """The model under each of the runtimes, which share what was read and sized.

    Versions are of those that run on them.
    """
    from memfit.estimators.runtimes.registry import runtime_names

    wanted = [name.strip() for name in names.split(",")]
    if wanted == ["all"]:
        wanted = list(runtime_names())
    if len(set(wanted)) < len(wanted):
        raise InputError(f"--runtimes {names[:60]}: a runtime is given twice")
    runtimes = [runtime.versioned(named_runtime(name), strict=False) for name in wanted]
    return [
        replace(model, label=name, runtime=one)
        for name, one in zip(wanted, _with_capacity(runtimes, runtime), strict=True)
    ]


def _with_capacity(runtimes: "list[Runtime]", options: RuntimeQuestion) -> "list[Runtime]":
    """The runtimes, with the experts of --capacity under those that keep a number of them."""
    results, refused = [], []
    for runtime in runtimes:
        try:
            results.append(options.with_settings(runtime, ("capacity",)))
        except InputError as error:
            results.append(runtime)
            refused.append(error)
    if len(refused) == len(runtimes):
        raise refused[0]
    return results


def _any_will_do(runtimes: str | None, result: "Comparison") -> bool:
    """Not every runtime can run every model: one that can is enough."""
    return runtimes == "all" and any(
        model.verdict not in (None, "does_not_load") for model in result.models
    )


def _code(result: "Comparison") -> Exit:
    """A comparison has no verdict: the code is 0 unless something has no figure."""
    slugs = {undecided.slug for undecided in result.undecided}
    if UnreachableError.slug in slugs:
        return Exit.UNREACHABLE
    return Exit.UNSUPPORTED if slugs or result.has_refusals else Exit.YES
