"""llama.cpp: everything is allocated before the first token, for the whole context."""

import shlex
from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import Units, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.context import AutoContext
from memfit.estimators.runtimes.interface import MemoryFigures, RuntimeModel, Subject
from memfit.estimators.runtimes.llama_cpp.caches import (
    CACHE_TYPES,
    CacheTypes,
    Cells,
    cache_lines,
    cache_types,
    caches,
    cells,
    recurrent_bytes,
)
from memfit.estimators.runtimes.llama_cpp.compute import Compute, compute_bound
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.token_cache import TokenCacheModel
from memfit.estimators.workspace.peak import PeakMoment

# Commit 0c1e57098; its build b11549 allocates the same.
LLAMA_CPP = Runtime(
    name="llama.cpp",
    version="b11549",
    prefill_step=512,  # common/common.h, n_ubatch
    batch=2048,  # common/common.h, n_batch
    kv_step=256,  # src/llama-context.cpp, the padding of n_ctx; llama-kv-cache-iswa.cpp
    kv_group_size=32,  # ggml/src/ggml-common.h, QK8_0, QK5_0 and QK4_0
    quantized_kv_start=0,  # the types of the cache hold from its first token on
    cache_dtype="F16",
    growth="contiguous",
    charges="attention layers",
    budget=Budget("working_set", 100),
    keeps="everything where its layers are placed; here in one memory",
    allocates="the whole context before the first token, a window's with room for a micro-batch",
    source=("https://github.com/ggml-org/llama.cpp, src/llama-context.cpp and llama-kv-cache.cpp"),
)
_TENSOR_ALIGNMENT = 32  # general.alignment's default, and ggml's own (ggml-backend)


class LlamaCpp(TokenCacheModel, frozen=True):
    """llama.cpp on a conversion of the checkpoint."""

    defaults = LLAMA_CPP
    loads_only_gguf = True
    activation_dtype = "F32"

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> RuntimeModel:
        """Return the model under llama.cpp, by its exact rules for a GGUF file."""
        if subject.checkpoint.source == "gguf":
            return LlamaCppGguf(runtime, subject)
        return cls(runtime, subject)

    @classmethod
    def window_capacity(cls, runtime: Runtime, workload: Workload, window: int) -> int:
        """Return the capacity. Source: llama-kv-cache-iswa.cpp."""
        return round_up(window + workload.prefill_step, runtime.kv_step)

    def states(self, workload: Workload) -> int:
        """Return the bytes of all recurrent states, which are float32."""
        return recurrent_bytes(self.subject.model, workload.batch)

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> AutoContext:
        """Return the model's own context, and the longest that fits."""
        reason = ""
        if most > longest:
            reason = f"llama.cpp takes the model's own {most} tokens unless a context is set"
        return AutoContext(self.runtime.budget.of_device(device), most, longest, reason)


class LlamaCppGguf(LlamaCpp, frozen=True):
    """llama.cpp on a GGUF file; a moment is the first micro-batch."""

    types: CacheTypes | None = None
    """The types of the cache; None where the workload's KV bits decide."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights with each tensor at its alignment, whatever the backend."""
        sizes = self.subject.footprint.sizes
        return sum(count * round_up(size, _TENSOR_ALIGNMENT) for size, count in sizes.items())

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes.

        Raises:
            UnsupportedError: for a limit of a rotating cache, or a cache of impossible types.
        """
        if workload.max_kv_size is not None:
            raise UnsupportedError("llama.cpp has no rotating cache: leave out max_kv_size")
        model, weights = self.subject.model, self.resident_bytes
        room, types = self._layout(workload)
        kept = caches(model, room, types, workload.total_tokens)
        states = recurrent_bytes(model, room.sequences)
        compute = compute_bound(model, self.subject.checkpoint.tensors or (), room)
        moment = PeakMoment(
            phase="prefill",
            nbytes=weights + kept.nbytes + states + compute.nbytes,
            workspace_bytes=compute.nbytes,
            largest_buffer_bytes=max([*self.subject.footprint.sizes, compute.nbytes, kept.nbytes]),
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
        return MemoryFigures(kv, states, moment)

    def runs_kv_bits(self, workload: Workload) -> bool:
        """Whether the types of its cache were left open."""
        return self.types is None

    def commands(self, workload: Workload, model: str, kept_caches: int) -> tuple[str, ...]:
        """Return the command of llama-server (common/arg.cpp); its context is of all sequences."""
        types, sequences = cache_types(workload, self.types), workload.batch
        context = sequences * workload.total_tokens
        command = ["llama-server", "-m", model, "-c", str(context), "-np", str(sequences)]
        command += ["-ub", str(workload.prefill_step)]
        if types != cache_types(replace(workload, kv_bits=None), None):
            command += ["-ctk", types.keys, "-ctv", types.values]
        return (shlex.join(command),)

    def _layout(self, workload: Workload) -> tuple[Cells, CacheTypes]:
        """The cells and the types of the cache."""
        return cells(workload, self.runtime), cache_types(workload, self.types)

    def assumptions(self, workload: Workload, units: Units) -> Iterator[str]:
        """Yield what is assumed of llama.cpp."""
        room, types = self._layout(workload)
        yield (
            f"llama.cpp's context is as long as the workload: {room.full} cells for each of"
            f" {room.sequences} sequences, keys in {types.keys} and values in {types.values}"
        )
        yield (
            "flash attention is on, as llama.cpp decides where the backend has it; everything is"
            " in one memory, and what a backend's kernels allocate outside the compute buffer is"
            " not counted"
        )
        yield (
            "the workspace is an upper bound: llama.cpp's compute buffer with nothing sharing room"
        )

    def allocation_rules(self) -> Iterator[str]:
        """Yield nothing: its rules for GGUF files are exact."""
        return iter(())

    def explain(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        """Yield the lines that derive resident weights, caches and states."""
        footprint = self.subject.footprint
        yield (
            f"resident weights = {footprint.loaded_bytes} bytes, each of"
            f" {footprint.sizes.total()} tensors rounded up to 32 bytes = {self.resident_bytes}"
            " bytes"
        )
        room, types = self._layout(workload)
        yield from cache_lines(self.subject.model, room, types, workload.total_tokens)


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


def _explained(compute: Compute, room: Cells, rest: int) -> tuple[str, ...]:
    parts = " + ".join(f"{name} {nbytes}" for name, nbytes in compute._asdict().items())
    return (
        f"compute bound for {room.microbatch} tokens on {room.full} cells = {parts}"
        f" = {compute.nbytes} bytes",
        f"peak = weights, caches and states {rest} + compute {compute.nbytes}"
        f" = {rest + compute.nbytes} bytes",
    )
