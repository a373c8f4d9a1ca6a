"""Every figure as its formula with the numbers put in."""

from collections.abc import Iterator

from memfit.estimators.base import dtypes
from memfit.estimators.base.units import open_limit
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.result import both_units
from memfit.estimators.runtimes.expert_capacity import capacity_of
from memfit.estimators.runtimes.facets import decoding_rows
from memfit.estimators.runtimes.runtime import comfortable_bytes
from memfit.estimators.sizing.decode_speed import decode_speed
from memfit.estimators.sizing.sized_model import SizedModel, draft_bytes_of, draft_figures


def explain(sized: SizedModel, workload: Workload) -> tuple[str, ...]:
    """Return the lines that derive each figure of an estimate."""
    figures = sized.figures_for(workload)
    lines = (
        *_weights(sized),
        *sized.runtime_model.statements(workload, figures).explanation,
        *figures.moment.explanation,
        *_draft(sized, workload),
        _workspace(sized, workload),
        *_verdict(sized, workload),
        *_capacity(sized),
        *_decode_speed(sized, workload),
    )
    return both_units(lines)


def _weights(sized: SizedModel) -> Iterator[str]:
    footprint = sized.footprint
    tensors = footprint.sizes.total()
    parts = " + ".join(f"{name} {nbytes}" for name, nbytes in footprint.by_part.items() if nbytes)
    if footprint.basis == "exact":
        yield f"weights = sum over all tensors of the headers = {parts} = {footprint.nbytes} bytes"
    else:
        yield f"weights = sum of shape x bytes per element = {parts} = {footprint.nbytes} bytes"
    if footprint.plan:
        q = footprint.plan.default
        width = dtypes.BITS[sized.model.dtype]
        scales, bits = (f"2 x {width}", 2 * width) if q.mode == "affine" else ("8", 8)
        yield (
            f"  quantised {q.mode}: bits per weight = {q.bits} + {scales} / {q.group_size}"
            f" = {q.bits + bits / q.group_size:g}, unless a module has its own"
        )
    if footprint.loaded_bytes != footprint.nbytes:
        yield f"loaded weights = {footprint.loaded_bytes} bytes in {tensors} arrays"


def _workspace(sized: SizedModel, workload: Workload) -> str:
    figures = sized.figures_for(workload)
    return (
        f"workspace = peak {figures.moment.nbytes} - resident weights {sized.resident_bytes}"
        f" - caches {figures.kv.nbytes} and states {figures.ssm_bytes} as the workload leaves them"
        f" = {figures.moment.workspace_bytes} bytes"
    )


def _draft(sized: SizedModel, workload: Workload) -> Iterator[str]:
    if drafted := draft_figures(sized, workload):
        yield f"with the draft model: {drafted.explanation}"


def _verdict(sized: SizedModel, workload: Workload) -> Iterator[str]:
    need = sized.requirement(workload)
    yield (
        f"need = peak {sized.figures_for(workload).moment.nbytes}"
        f" + draft {draft_bytes_of(sized, workload)} + margin {sized.margin_bytes}"
        f" = {need.peak_bytes} bytes"
    )
    if sized.device:
        limit, share = sized.device.working_set_bytes, ""
        if not (need.budget and need.budget.is_taken):
            limit, share = comfortable_bytes(limit), f"9 / 10 of the working set {limit} = "
        yield f"fits when need <= {share}{limit} bytes ({open_limit(limit)})"
    if sized.device and need.budget and need.budget.is_limit:
        part = "the cache's" if need.budget.for_cache else "its own"
        yield (
            f"and {part} {need.budgeted_bytes} bytes <= the budget of {sized.runtime},"
            f" {need.budget.of_device(sized.device)} bytes"
        )


def _capacity(sized: SizedModel) -> Iterator[str]:
    capacity = capacity_of(sized.runtime_model)
    if capacity and sized.device:
        experts = sized.footprint.by_part["experts"]
        yield (
            f"expert capacity = (71 / 100 x {sized.device.working_set_bytes}"
            f" - {sized.footprint.loaded_bytes - experts}) x {capacity.of} / {experts}"
            f" rounded down = {capacity.experts}"
        )


def _decode_speed(sized: SizedModel, workload: Workload) -> Iterator[str]:
    rows = decoding_rows(sized.runtime_model, workload)
    if speed := decode_speed(sized, workload):
        yield (
            f"decode speed <= bandwidth {speed.bandwidth_bytes_per_second} x batch {rows}"
            f" / bytes read in a step {speed.bytes_per_step}"
            f" = {speed.most_tokens_per_second:.1f} tokens a second"
        )
