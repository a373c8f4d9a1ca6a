"""Models side by side: the same figures under the same conditions, and a matrix of verdicts."""

from collections.abc import Iterator, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.compare.axes import MatrixAxis, check_axes, combinations
from memfit.estimators.machine.device import Device
from memfit.estimators.results.comparison import (
    Compared,
    ComparedCell,
    ComparedFigure,
    ComparedValue,
    Comparison,
    Difference,
    Matrix,
    SettingValue,
    Unavailable,
    try_or_reason,
)
from memfit.estimators.results.estimate import DeviceSummary, Estimate
from memfit.estimators.results.terms import Basis
from memfit.estimators.runtimes.registry import (
    DEFAULT_RUNTIME,
    get_runtime,
    runtime_for_images,
    runtime_summary,
)
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import (
    device_summary,
    estimate,
    notes_on_versions,
    workload_notes,
)
from memfit.estimators.sizing.recommend import recommended_context
from memfit.estimators.sizing.resolved import ResolvedTarget, TargetQuestion
from memfit.estimators.sizing.run_limits import (
    notes_beyond,
    prompt_verdict,
    run_limits,
    tightened,
)
from memfit.estimators.sizing.sized_model import refusal_of, verdict_of


class ComparedModel(Struct, frozen=True):
    label: str
    reference: str
    """How the catalog finds it."""

    runtime: Runtime | None = None
    """Its own runtime; None where one runtime is for all models."""


def compare(
    catalog: Catalog,
    models: Sequence[ComparedModel],
    base: TargetQuestion,
    axes: Sequence[MatrixAxis] = (),
    *,
    runtime: Runtime | None = None,
) -> Comparison:
    """Return the models side by side, and every combination of the axes when there are any.

    The figures are those of the first combination, so that they agree with the matrix. A model
    or a cell without a figure says why. Without a ``runtime`` each model is sized as an estimate
    would size it: under its checkpoint's native runtime.

    Raises:
        InputError: when a checkpoint is damaged, or a combination is out of range.
    """
    check_axes(axes, len(models))
    cells = list(combinations(base, axes))
    first = cells[0][1]
    if runtime is None:
        asked = [replace(first, reference=each.reference) for each in models]
        heads = [try_or_reason(partial(catalog.drafts_with_head, each)) for each in asked]
        takes_more = first.workload.has_images or True in heads
        models, runtime = _native(catalog, models, by_mlx_vlm=takes_more)
    targets = [_resolved(catalog, model, first, runtime) for model in models]
    estimates = [_estimate(target) for target in targets]
    contexts = [_context(target) for target in targets]
    return Comparison(
        workload=first.workload.under(runtime.on(first.device)),
        runtime=runtime_summary(runtime),
        device=_machine(estimates, first.device),
        quantize=first.quantize,
        margin_bytes=first.margin_bytes,
        models=tuple(map(_compared, models, targets, estimates, contexts)),
        figures=tuple(_figures(estimates, contexts)),
        matrix=_matrix(catalog, models, axes, cells, runtime) if axes else None,
    )


def _machine(
    estimates: Sequence[Estimate | Unavailable], device: Device | None
) -> DeviceSummary | None:
    """The device as the runtime of all models sees it: MLX sets itself a limit on a GPU."""
    seen = {one.device for one in estimates if not isinstance(one, Unavailable)}
    if len(seen) == 1:
        return seen.pop()
    return device_summary(device) if device else None


def _native(
    catalog: Catalog, models: Sequence[ComparedModel], *, by_mlx_vlm: bool
) -> tuple[Sequence[ComparedModel], Runtime]:
    """One runtime for all models, or where their checkpoints' native ones differ each its own."""
    native = [try_or_reason(partial(catalog.native_runtime, model.reference)) for model in models]
    default = get_runtime(DEFAULT_RUNTIME)
    own = [default if isinstance(each, Unavailable) else each for each in native]
    if by_mlx_vlm:
        own = list(map(runtime_for_images, own))
    if len(set(own)) == 1:
        return models, own[0]
    pairs = zip(models, own, strict=True)
    return [replace(model, runtime=runtime) for model, runtime in pairs], default


def _resolved(
    catalog: Catalog, model: ComparedModel, question: TargetQuestion, default: Runtime
) -> ResolvedTarget | Unavailable:
    """The question for one model; a model that is described keeps its own type."""
    question = replace(question, reference=model.reference, runtime=model.runtime or default)
    if question.as_type:
        own = replace(question, as_type=None)
        if not isinstance(try_or_reason(partial(catalog.sized_for, own)), Unavailable):
            question = own
    return try_or_reason(partial(catalog.resolve, question))


def _estimate(target: ResolvedTarget | Unavailable) -> Estimate | Unavailable:
    if isinstance(target, Unavailable):
        return target
    return try_or_reason(lambda: estimate(target.sized, target.workload, advises=False))


def _context(target: ResolvedTarget | Unavailable) -> int | None:
    if isinstance(target, Unavailable) or refusal_of(target.sized):
        return None
    return recommended_context(target.sized, target.workload)


def _compared(
    model: ComparedModel,
    target: ResolvedTarget | Unavailable,
    result: Estimate | Unavailable,
    context: int | None,
) -> Compared:
    label = model.label
    if isinstance(target, Unavailable):
        return Compared(label=label, undecided=target)
    if isinstance(result, Unavailable):
        return Compared(label=label, undecided=result)
    longest = context or 0
    return Compared(
        label=label,
        runtime=result.runtime if model.runtime else None,
        model=result.model,
        needed_bytes=result.peak_bytes + result.components.margin.bytes,
        verdict=result.verdict,
        longest_verdict=prompt_verdict(target.sized, target.workload, longest),
        exceeded=result.exceeded,
        assumptions=result.assumptions,
        notes=(*result.notes, *notes_beyond(target.sized, target.workload, longest)),
    )


def _figures(
    estimates: Sequence[Estimate | Unavailable], contexts: Sequence[int | None]
) -> Iterator[ComparedFigure]:
    columns = [
        {} if isinstance(result, Unavailable) else dict(_amounts(result, context))
        for result, context in zip(estimates, contexts, strict=True)
    ]
    names = {name: None for column in columns for name in column}
    for name in names:
        amounts = [column.get(name) for column in columns]
        if name.startswith("weights.") and not any(amount and amount[0] for amount in amounts):
            continue
        values = (_value(amounts[0], None), *(_value(a, amounts[0]) for a in amounts[1:]))
        yield ComparedFigure(name, "tokens" if name == "recommended_context" else "bytes", values)


def _amounts(
    result: Estimate, context: int | None
) -> Iterator[tuple[str, tuple[int, Basis] | None]]:
    """The figures that are compared, in their order; every model has the same names."""
    parts = result.components
    weights, kv, workspace = parts.weights, parts.kv, parts.workspace
    yield "weights", (weights.bytes, weights.basis)
    for part, nbytes in weights.by_part.items():
        yield f"weights.{part}", (nbytes, weights.basis)
    yield "resident_weights", (weights.resident_bytes, weights.basis)
    yield "kv_per_token", (kv.bytes_per_token, kv.basis)
    yield "kv", (kv.bytes, kv.basis)
    yield "state", (parts.ssm.bytes, parts.ssm.basis)
    yield "workspace", (workspace.bytes, workspace.basis)
    yield "peak", (result.peak_bytes, result.peak_basis)
    yield "recommended_context", None if context is None else (context, result.peak_basis)


def _value(
    amount: tuple[int, Basis] | None, first: tuple[int, Basis] | None
) -> ComparedValue | None:
    if amount is None:
        return None
    value, basis = amount
    return ComparedValue(value, basis, difference(value, first[0]) if first else None)


def difference(value: int, first: int) -> Difference:
    """Return what ``value`` is above ``first``, with hundredths of a percent, halves away from 0.

    >>> difference(3, 2), difference(1999, 2000)
    (Difference(amount=1, percent=50.0), Difference(amount=-1, percent=-0.05))
    """
    amount = value - first
    if not first:
        return Difference(amount, None if amount else 0.0)
    hundredths = (2 * 10_000 * abs(amount) + first) // (2 * first)
    return Difference(amount, (hundredths if amount >= 0 else -hundredths) / 100)


def _matrix(
    catalog: Catalog,
    models: Sequence[ComparedModel],
    axes: Sequence[MatrixAxis],
    cells: Sequence[tuple[dict[str, SettingValue], TargetQuestion]],
    runtime: Runtime,
) -> Matrix:
    return Matrix(
        axes={axis.name: tuple(setting.value for setting in axis.settings) for axis in axes},
        cells=tuple(
            _cell(model.label, settings, _resolved(catalog, model, question, runtime))
            for settings, question in cells
            for model in models
        ),
    )


def _cell(
    label: str,
    settings: dict[str, SettingValue],
    target: ResolvedTarget | Unavailable,
) -> ComparedCell:
    if isinstance(target, Unavailable):
        return ComparedCell(settings=settings, model=label, undecided=target)
    sized, workload = target.sized, target.workload
    need = try_or_reason(lambda: sized.requirement(workload))
    if isinstance(need, Unavailable):
        return ComparedCell(settings=settings, model=label, undecided=need)
    verdict, exceeded = verdict_of(sized, workload)
    versions = notes_on_versions(sized, workload, of="")
    return ComparedCell(
        settings=settings,
        model=label,
        verdict=tightened(verdict, run_limits(sized, workload)),
        exceeded=exceeded,
        peak_bytes=need.peak_bytes - sized.margin_bytes,
        needed_bytes=need.peak_bytes,
        working_set_bytes=sized.device.working_set_bytes if sized.device else None,
        notes=(*workload_notes(sized, workload), *versions),
    )
