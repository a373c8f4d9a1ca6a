"""How mlx-lm's caches and states add up, as lines with the numbers put in."""

from collections.abc import Iterator

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import KVBuffer
from memfit.estimators.base import dtypes
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import buffer_counts, buffer_token_bytes, capacity_at


def cache_lines(model: Model, workload: Workload, kv_bytes: int) -> Iterator[str]:
    """Yield a line for each kind of cache, and ``kv_bytes`` as their total."""
    counted = buffer_counts(model, workload.max_kv_size)
    for buffer, layers in counted.items():
        yield _cache_line(model, workload, buffer, layers)
    if counted:
        yield f"KV cache = {kv_bytes} bytes"


def _cache_line(model: Model, workload: Workload, buffer: KVBuffer, layers: int) -> str:
    per_token = buffer_token_bytes(model, buffer, workload, workload.total_tokens)
    allocated = capacity_at(buffer, workload, workload.total_tokens)
    element = dtypes.nbytes(1, model.dtype)
    shape = f"{buffer.heads} heads x ({buffer.key_dim} + {buffer.value_dim})"
    if per_token == buffer.elements_per_token * element:
        width = f"{shape} x {element} bytes"
    else:
        width = (
            f"{shape} x ({workload.kv_bits} / 8 + 2 x {element} bytes of scale and bias"
            f" / {workload.kv_group_size})"
        )
    limit = f", {buffer.growth.value} at {buffer.limit}" if buffer.limit else ""
    total = layers * per_token * allocated * workload.batch
    return (
        f"KV of {layers} layers = {layers} x {width} x {allocated} tokens allocated"
        f" ({buffer.held_tokens(workload.total_tokens)} held{limit}) x batch {workload.batch}"
        f" = {total} bytes"
    )


def state_lines(model: Model, workload: Workload) -> Iterator[str]:
    """Yield a line for each kind of recurrent state."""
    for state, layers in model.state_counts.items():
        width = dtypes.nbytes(1, "F32" if state.float32 else model.dtype)
        total = layers * state.elements * width * workload.batch
        yield (
            f"state of {layers} layers = {layers} x {state.elements} elements x {width} bytes"
            f" x batch {workload.batch} = {total} bytes"
        )
