"""Every figure as its formula with the numbers put in."""

from collections import Counter
from collections.abc import Iterator

from memfit.estimators.arch.caches import KVBuffer
from memfit.estimators.base import dtypes
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.allocator import PAGE
from memfit.estimators.mlx.cache_growth import capacity_at
from memfit.estimators.mlx.kv_cache import buffer_token_bytes, kv_buffers
from memfit.estimators.runtimes.llama_cpp.caches import explained
from memfit.estimators.runtimes.llama_cpp.runtime import LlamaEngine
from memfit.estimators.runtimes.ruled import RuledEngine
from memfit.estimators.sizing.recommend import capacity_of
from memfit.estimators.sizing.sized_model import SizedModel


def explain(sized: SizedModel, workload: Workload, units: Units) -> tuple[str, ...]:
    """Return the lines that derive each figure of an estimate."""
    return (
        *_weights(sized),
        *_kept(sized, workload),
        *sized.figures_for(workload).moment.explanation,
        _workspace(sized, workload),
        *_verdict(sized, workload, units),
        *_capacity(sized),
    )


def _kept(sized: SizedModel, workload: Workload) -> Iterator[str]:
    if isinstance(sized.engine, LlamaEngine):
        room, types = sized.engine.layout(workload)
        yield from explained(sized.model, room, types, workload.total_tokens)
    elif not isinstance(sized.engine, RuledEngine):
        yield from _caches(sized, workload)
        yield from _states(sized, workload)


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
    if isinstance(sized.engine, LlamaEngine):
        yield (
            f"resident weights = {footprint.loaded_bytes} bytes, each of {tensors} tensors rounded"
            f" up to 32 bytes = {sized.resident_bytes} bytes"
        )
        return
    yield (
        f"resident weights = {footprint.loaded_bytes} bytes, each of {tensors} arrays above"
        f" {PAGE} bytes rounded up as the {sized.backend} allocator does"
        f" = {sized.resident_bytes} bytes"
    )


def _caches(sized: SizedModel, workload: Workload) -> Iterator[str]:
    model = sized.model
    counted = Counter(kv_buffers(model, workload.max_kv_size))
    for buffer, layers in counted.items():
        yield _cache_line(sized, workload, buffer, layers)
    if counted:
        yield f"KV cache = {sized.figures_for(workload).kv.nbytes} bytes"


def _cache_line(sized: SizedModel, workload: Workload, buffer: KVBuffer, layers: int) -> str:
    per_token = buffer_token_bytes(sized.model, buffer, workload, workload.total_tokens)
    allocated = capacity_at(buffer, workload, workload.total_tokens)
    plain = buffer.elements_per_token * dtypes.nbytes(1, sized.model.dtype)
    shape = f"{buffer.heads} heads x ({buffer.key_dim} + {buffer.value_dim})"
    if per_token == plain:
        width = f"{shape} x {dtypes.nbytes(1, sized.model.dtype)} bytes"
    else:
        width = (
            f"{shape} x ({workload.kv_bits} / 8 + 2 x {dtypes.nbytes(1, sized.model.dtype)} bytes"
            f" of scale and bias / {workload.kv_group_size})"
        )
    limit = f", {buffer.growth.value} at {buffer.limit}" if buffer.limit else ""
    total = layers * per_token * allocated * workload.batch
    return (
        f"KV of {layers} layers = {layers} x {width} x {allocated} tokens allocated"
        f" ({buffer.held_tokens(workload.total_tokens)} held{limit}) x batch {workload.batch}"
        f" = {total} bytes"
    )


def _states(sized: SizedModel, workload: Workload) -> Iterator[str]:
    for state, layers in Counter(sized.model.states()).items():
        width = dtypes.nbytes(1, "F32" if state.float32 else sized.model.dtype)
        total = layers * state.elements * width * workload.batch
        yield (
            f"state of {layers} layers = {layers} x {state.elements} elements x {width} bytes"
            f" x batch {workload.batch} = {total} bytes"
        )


def _workspace(sized: SizedModel, workload: Workload) -> str:
    figures = sized.figures_for(workload)
    return (
        f"workspace = peak {figures.moment.nbytes} - resident weights {sized.resident_bytes}"
        f" - caches {figures.kv.nbytes} and states {figures.ssm_bytes} as the workload leaves them"
        f" = {figures.moment.workspace_bytes} bytes"
    )


def _verdict(sized: SizedModel, workload: Workload, units: Units) -> Iterator[str]:
    need = sized.requirement(workload)
    yield (
        f"need = peak {sized.figures_for(workload).moment.nbytes}"
        f" + draft {sized.draft_bytes(workload)} + margin {sized.margin_bytes}"
        f" = {need.peak_bytes} bytes"
    )
    if sized.device:
        working_set = sized.device.working_set_bytes
        yield (
            f"fits when need <= 9 / 10 of the working set {working_set}"
            f" = {working_set * 9 // 10} bytes ({format_bytes(working_set * 9 // 10, units)})"
        )


def _capacity(sized: SizedModel) -> Iterator[str]:
    capacity = capacity_of(sized, sized.device) if sized.device else None
    if capacity and sized.device:
        experts = sized.footprint.by_part["experts"]
        yield (
            f"expert capacity = (71 / 100 x {sized.device.working_set_bytes}"
            f" - {sized.footprint.loaded_bytes - experts}) x {capacity.of} / {experts}"
            f" rounded down = {capacity.experts}"
        )
