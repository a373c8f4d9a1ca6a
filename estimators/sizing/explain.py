"""Every figure as its formula with the numbers put in."""

from collections import Counter
from collections.abc import Iterator

from memfit.estimators.base import dtypes
from memfit.estimators.arch.caches import KVBuffer, StateBuffer
from memfit.estimators.mlx.kv_cache import buffer_token_bytes, kv_buffers
from memfit.estimators.runtimes.llama_cpp.caches import explained
from memfit.estimators.runtimes.llama_cpp.runtime import LlamaEngine
from memfit.estimators.mlx.allocator import PAGE
from memfit.estimators.sizing.recommend import capacity_of
from memfit.estimators.runtimes.ruled import RuledEngine
from memfit.estimators.sizing.sized_model import Sizing
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload


def explain(sizing: Sizing, workload: Workload, units: Units) -> tuple[str, ...]:
    """Return the lines that derive each figure of an estimate."""
    return (
        *_weights(sizing),
        *_kept(sizing, workload),
        *sizing.at(workload).moment.explanation,
        _workspace(sizing, workload),
        *_verdict(sizing, workload, units),
        *_capacity(sizing),
    )


def _kept(sizing: Sizing, workload: Workload) -> Iterator[str]:
    if isinstance(sizing.engine, LlamaEngine):
        room, types = sizing.engine.layout(workload)
        yield from explained(sizing.model, room, types, workload.total_tokens)
    elif not isinstance(sizing.engine, RuledEngine):
        yield from _caches(sizing, workload)
        yield from _states(sizing, workload)


def _weights(sizing: Sizing) -> Iterator[str]:
    weighed = sizing.weighed
    tensors = weighed.sizes.total()
    parts = " + ".join(f"{name} {nbytes}" for name, nbytes in weighed.by_part.items() if nbytes)
    if weighed.basis == "exact":
        yield f"weights = sum over all tensors of the headers = {parts} = {weighed.nbytes} bytes"
    else:
        yield f"weights = sum of shape x bytes per element = {parts} = {weighed.nbytes} bytes"
    if weighed.plan:
        q = weighed.plan.default
        width = dtypes.BITS[sizing.model.dtype]
        scales, bits = (f"2 x {width}", 2 * width) if q.mode == "affine" else ("8", 8)
        yield (
            f"  quantised {q.mode}: bits per weight = {q.bits} + {scales} / {q.group_size}"
            f" = {q.bits + bits / q.group_size:g}, unless a module has its own"
        )
    if weighed.loaded_bytes != weighed.nbytes:
        yield f"loaded weights = {weighed.loaded_bytes} bytes in {tensors} arrays"
    if isinstance(sizing.engine, LlamaEngine):
        yield (
            f"resident weights = {weighed.loaded_bytes} bytes, each of {tensors} tensors rounded up"
            f" to 32 bytes = {sizing.resident_bytes} bytes"
        )
        return
    yield (
        f"resident weights = {weighed.loaded_bytes} bytes, each of {tensors} arrays above"
        f" {PAGE} bytes rounded up as the {sizing.backend} allocator does"
        f" = {sizing.resident_bytes} bytes"
    )


def _caches(sizing: Sizing, workload: Workload) -> Iterator[str]:
    model = sizing.model
    counted = Counter(kv_buffers(model, workload.max_kv_size))
    for buffer, layers in counted.items():
        yield _cache_line(sizing, workload, buffer, layers)
    if counted:
        yield f"KV cache = {sizing.at(workload).kv.nbytes} bytes"


def _cache_line(sizing: Sizing, workload: Workload, buffer: KVBuffer, layers: int) -> str:
    per_token = buffer_token_bytes(sizing.model, buffer, workload, workload.total_tokens)
    allocated = buffer.allocated_tokens(workload)
    plain = buffer.elements_per_token * dtypes.nbytes(1, sizing.model.dtype)
    shape = f"{buffer.heads} heads x ({buffer.key_dim} + {buffer.value_dim})"
    if per_token == plain:
        width = f"{shape} x {dtypes.nbytes(1, sizing.model.dtype)} bytes"
    else:
        width = (
            f"{shape} x ({workload.kv_bits} / 8 + 2 x {dtypes.nbytes(1, sizing.model.dtype)} bytes"
            f" of scale and bias / {workload.kv_group_size})"
        )
    limit = f", {buffer.growth.value} at {buffer.limit}" if buffer.limit else ""
    total = layers * per_token * allocated * workload.batch
    return (
        f"KV of {layers} layers = {layers} x {width} x {allocated} tokens allocated"
        f" ({buffer.held_tokens(workload.total_tokens)} held{limit}) x batch {workload.batch}"
        f" = {total} bytes"
    )


def _states(sizing: Sizing, workload: Workload) -> Iterator[str]:
    counted: Counter[StateBuffer] = Counter(
        cache
        for layer in sizing.model.layers
        for mixer in layer.mixers
        for cache in mixer.caches()
        if isinstance(cache, StateBuffer)
    )
    for state, layers in counted.items():
        width = dtypes.nbytes(1, "F32" if state.float32 else sizing.model.dtype)
        total = layers * state.elements * width * workload.batch
        yield (
            f"state of {layers} layers = {layers} x {state.elements} elements x {width} bytes"
            f" x batch {workload.batch} = {total} bytes"
        )


def _workspace(sizing: Sizing, workload: Workload) -> str:
    figures = sizing.at(workload)
    return (
        f"workspace = peak {figures.moment.nbytes} - resident weights {sizing.resident_bytes}"
        f" - caches {figures.kv.nbytes} and states {figures.ssm_bytes} as the workload leaves them"
        f" = {figures.moment.workspace_bytes} bytes"
    )


def _verdict(sizing: Sizing, workload: Workload, units: Units) -> Iterator[str]:
    need = sizing.need(workload)
    yield (
        f"need = peak {sizing.at(workload).moment.nbytes}"
        f" + draft {sizing.draft_bytes(workload)} + margin {sizing.margin_bytes}"
        f" = {need.peak_bytes} bytes"
    )
    if sizing.device:
        working_set = sizing.device.working_set_bytes
        yield (
            f"fits when need <= 9 / 10 of the working set {working_set}"
            f" = {working_set * 9 // 10} bytes ({format_bytes(working_set * 9 // 10, units)})"
        )


def _capacity(sizing: Sizing) -> Iterator[str]:
    capacity = capacity_of(sizing, sizing.device) if sizing.device else None
    if capacity and sizing.device:
        experts = sizing.weighed.by_part["experts"]
        yield (
            f"expert capacity = (71 / 100 x {sizing.device.working_set_bytes}"
            f" - {sizing.weighed.loaded_bytes - experts}) x {capacity.of} / {experts}"
            f" rounded down = {capacity.experts}"
        )
