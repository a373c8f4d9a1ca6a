"""llama.cpp's rules as an engine: everything is allocated before the first token."""

from collections.abc import Iterator

from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.records import record
from memfit.estimators.base.units import round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.estimate import Basis
from memfit.estimators.runtimes.interface import Figures, RuntimeModel
from memfit.estimators.runtimes.llama_cpp.caches import (
    CACHE_TYPES,
    CacheTypes,
    Cells,
    cache_types,
    caches,
    cells,
    recurrent_bytes,
)
from memfit.estimators.runtimes.llama_cpp.compute import Compute, compute_bound
from memfit.estimators.runtimes.registry import LLAMA_CPP, get_runtime
from memfit.estimators.weights.footprint import WeightFootprint
from memfit.estimators.workspace import PeakMoment

_TENSOR_ALIGNMENT = 32  # general.alignment's default, and ggml's own (ggml-backend)


@record(frozen=True, slots=True)
class LlamaEngine:
    """llama.cpp: everything is allocated before the first token, for the whole context.

    ``types`` are those of the cache, None where the workload's KV bits tell them.
    """

    tensors: tuple[Tensor, ...]
    types: CacheTypes | None = None
    runtime: str = LLAMA_CPP
    workspace_basis: tuple[Basis, int] = ("bound", 0)

    def resident_bytes(self, footprint: WeightFootprint, backend: Backend) -> int:
        """Return the bytes with each tensor at its alignment, whatever the backend."""
        return sum(
            count * round_up(size, _TENSOR_ALIGNMENT) for size, count in footprint.sizes.items()
        )

    def figures(
        self, model: Model, footprint: WeightFootprint, workload: Workload, device: Device | None
    ) -> Figures:
        """Return what a workload takes; the largest moment is the first micro-batch."""
        if workload.max_kv_size is not None:
            raise UnsupportedError("llama.cpp has no limit of a rotating cache; leave it away")
        room, types = self.layout(workload)
        kept = caches(model, room, types, workload.total_tokens)
        states = recurrent_bytes(model, room.sequences)
        compute = compute_bound(model, self.tensors, room)
        weights = self.resident_bytes(footprint, "cpu")
        moment = PeakMoment(
            phase="prefill",
            nbytes=weights + kept.nbytes + states + compute.nbytes,
            workspace_bytes=compute.nbytes,
            largest_buffer_bytes=max([*footprint.sizes, compute.nbytes, kept.nbytes]),
            largest_buffer="compute buffer",
            explanation=_explained(compute, room, weights + kept.nbytes + states),
        )
        kv = KVCache(
            nbytes=kept.nbytes,
            held_bytes=kept.held_bytes,
            bytes_per_token=kept.bytes_per_token,
            held_tokens=kept.held_tokens,
            allocated_tokens=kept.cells,
        )
        return Figures(kv, states, moment)

    def layout(self, workload: Workload) -> tuple[Cells, CacheTypes]:
        """Return the cells and the types of the cache."""
        return cells(workload, get_runtime(LLAMA_CPP)), cache_types(workload, self.types)


def parse_cache_types(text: str) -> CacheTypes:
    """Return the types of a text such as ``q8_0`` or ``q8_0,f16``: of keys, and of values.

    Raises:
        InputError: when llama.cpp keeps no cache in such a type.
    """
    names = [name.strip().lower() for name in text.split(",")]
    if len(names) > 2 or not all(name in CACHE_TYPES for name in names):
        raise InputError(
            f"{text[:60]!r}: llama.cpp keeps a cache in {', '.join(CACHE_TYPES)}; give one, or one"
            " for keys and one for values"
        )
    return CacheTypes(names[0], names[-1])


def llama_assumptions(engine: RuntimeModel, workload: Workload) -> Iterator[str]:
    """Yield what was taken for granted of llama.cpp, where it is the engine."""
    if not isinstance(engine, LlamaEngine):
        return
    room, types = engine.layout(workload)
    yield (
        f"llama.cpp's context is as long as the workload: {room.full} cells for each of"
        f" {room.sequences} sequences, keys in {types.keys} and values in {types.values}"
    )
    yield (
        "flash attention is on, as llama.cpp decides where the backend has it; everything lies in"
        " one memory, and what a backend's kernels take beside the compute buffer is not counted"
    )
    yield "the workspace is an upper bound: llama.cpp's compute buffer with nothing sharing room"


def _explained(compute: Compute, room: Cells, rest: int) -> tuple[str, ...]:
    parts = " + ".join(f"{name} {nbytes}" for name, nbytes in compute._asdict().items())
    return (
        f"compute bound for {room.microbatch} tokens on {room.full} cells = {parts}"
        f" = {compute.nbytes} bytes",
        f"peak = weights, caches and states {rest} + compute {compute.nbytes}"
        f" = {rest + compute.nbytes} bytes",
    )
