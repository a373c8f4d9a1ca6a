"""llama.cpp: everything is allocated before the first token, for the whole context."""

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import Attention
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import Units, format_bytes, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.context import AutoContext
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.llama_cpp.builder import Context
from memfit.estimators.runtimes.llama_cpp.caches import (
    cache_lines,
    cache_types,
    caches,
    cell_widths,
    cells,
    recurrent_bytes,
)
from memfit.estimators.runtimes.llama_cpp.compute import Placement, compute_buffers
from memfit.estimators.runtimes.llama_cpp.settings import LlamaCppRuntime
from memfit.estimators.runtimes.llama_cpp.weights import read_weights
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.token_cache import TokenCacheModel
from memfit.estimators.runtimes.token_cost import TokenCost
from memfit.estimators.workspace.peak import PeakMoment

# Commit 0c1e57098; its build b11549 allocates the same.
LLAMA_CPP = LlamaCppRuntime(
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
_FLOAT = 4
_TENSOR_ALIGNMENT = 32  # general.alignment's default, and ggml's own (ggml-backend)


class LlamaCpp(TokenCacheModel, frozen=True):
    """llama.cpp on a GGUF file, or on the conversion of a checkpoint."""

    defaults = LLAMA_CPP
    loads_only_gguf = True
    workspace_basis = ("derived", 10)

    @property
    def settings(self) -> LlamaCppRuntime:
        """The runtime with llama.cpp's own settings."""
        assert isinstance(self.runtime, LlamaCppRuntime)
        return self.runtime

    @property
    def is_gguf(self) -> bool:
        """Whether the checkpoint is what llama.cpp loads."""
        return self.subject.checkpoint.source == "gguf"

    @property
    def flash(self) -> bool:
        """Whether attention is fused; a GGUF file's architecture may rule it out."""
        mixers = self.subject.model.mixers() if self.is_gguf else ()
        kept_out = any(isinstance(mixer, Attention) and not mixer.fused for mixer in mixers)
        return self.settings.flash and not kept_out

    @classmethod
    def token_costs(
        cls, model: Model, runtime: Runtime, workload: Workload
    ) -> tuple[TokenCost, ...]:
        """Return what llama.cpp caches for every token, equal layers together.

        Raises:
            UnsupportedError: for KV bits it has no type for.
        """
        given = runtime.types if isinstance(runtime, LlamaCppRuntime) else None
        types = cache_types(workload, given)
        room = cells(workload, runtime)
        kinds = Counter(
            (sum(types.row_bytes(*widths)), mixer.window)
            for mixer in model.mixers()
            for widths in (cell_widths(mixer) if mixer.owns_cache else ())
        )
        return tuple(
            TokenCost(layers, nbytes, window, room.windowed(window) if window else None)
            for (nbytes, window), layers in kinds.items()
        )

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
        context = self._context(workload, all_outputs=True)
        room, types = context.room, context.types
        kept = caches(model, room, types, workload.total_tokens, flash=context.flash)
        states = recurrent_bytes(model, room.sequences)
        compute = self._compute(context)
        moment = PeakMoment(
            phase="prefill",
            nbytes=weights + kept.nbytes + states + compute.nbytes,
            workspace_bytes=compute.nbytes,
            largest_buffer_bytes=max([*self.subject.footprint.sizes, *compute, kept.nbytes]),
            largest_buffer="compute buffer",
            explanation=_explained(compute, context, weights + kept.nbytes + states),
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
        return self.settings.types is None

    def commands(self, workload: Workload, model: str, kept_caches: int) -> tuple[str, ...]:
        """Return the command of llama-server (common/arg.cpp); its context is of all sequences."""
        if not self.is_gguf:
            return ()
        types, sequences = cache_types(workload, self.settings.types), workload.batch
        context = sequences * workload.total_tokens
        command = ["llama-server", "-m", model, "-c", str(context), "-np", str(sequences)]
        command += ["-ub", str(workload.prefill_step)]
        if types != cache_types(replace(workload, kv_bits=None), None):
            command += ["-ctk", types.keys, "-ctv", types.values]
        if not self.settings.flash:
            command += ["-fa", "off"]
        return (shlex.join(command),)

    def _context(self, workload: Workload, *, all_outputs: bool) -> Context:
        """The context that llama.cpp makes, with logits of all tokens or of one a sequence."""
        room = cells(workload, self.runtime)
        types = cache_types(workload, self.settings.types)
        outputs = room.microbatch if all_outputs else min(room.sequences, room.microbatch)
        return Context(room, types, self.flash, outputs)

    def _compute(self, context: Context) -> "Compute":
        subject = self.subject
        weights = read_weights(
            (subject.checkpoint.tensors or ()) if self.is_gguf else (),
            nbytes=subject.footprint.loaded_bytes,
            elements=subject.footprint.parameters,
        )
        blocks = weights.blocks or len(subject.model.layers)
        layers = 0 if subject.backend == "cpu" else blocks + 1
        placement = Placement(subject.backend, layers)
        sizes = compute_buffers(subject.model, context, weights, placement)
        logits = _FLOAT * subject.model.vocab_size * context.room.sequences
        return Compute(gpu=sizes.gpu, host=sizes.host, output=logits)

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> AutoContext:
        """Return the model's own context, and the longest that fits."""
        reason = ""
        if most > longest:
            reason = f"llama.cpp takes the model's own {most} tokens unless a context is set"
        return AutoContext(self.runtime.budget.of_device(device), most, longest, reason)

    def assumptions(self, workload: Workload, units: Units) -> Iterator[str]:
        """Yield what is assumed of llama.cpp."""
        context = self._context(workload, all_outputs=True)
        if not self.is_gguf:
            yield from TokenCacheModel.assumptions(self, workload, units)
        yield (
            f"llama.cpp's context is as long as the workload: {context.room.full} cells for each of"
            f" {context.room.sequences} sequences, keys in {context.types.keys} and values in"
            f" {context.types.values}"
        )
        yield f"flash attention is {'on' if context.flash else 'off'}; everything is in one memory"
        least = self._compute(self._context(workload, all_outputs=False)).nbytes
        less = format_bytes(self._compute(context).nbytes - least, units)
        yield (
            "the compute buffers have room for the logits of a whole micro-batch, as llama.cpp"
            f" reserves them for a library; for llama-server of this build {less} less"
        )

    def allocation_rules(self) -> Iterator[str]:
        """Yield how it allocates, where a conversion is not what is sized."""
        if not self.is_gguf:
            yield f"{self.name}: {self.runtime.allocates}"
            yield f"{self.name} loads GGUF files: a conversion's weights will have other sizes"

    def explain(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        """Yield the lines that derive resident weights, caches and states."""
        footprint = self.subject.footprint
        yield (
            f"resident weights = {footprint.loaded_bytes} bytes, each of"
            f" {footprint.sizes.total()} tensors rounded up to 32 bytes = {self.resident_bytes}"
            " bytes"
        )
        room, types, flash, *_ = self._context(workload, all_outputs=True)
        tokens = workload.total_tokens
        yield from cache_lines(self.subject.model, room, types, tokens, flash=flash)


class Compute(NamedTuple):
    """Bytes of the compute buffers, and of the buffer of logits that the program reads."""

    gpu: int
    host: int
    output: int

    @property
    def nbytes(self) -> int:
        """Return all of them."""
        return sum(self)


def _explained(compute: Compute, context: Context, rest: int) -> tuple[str, ...]:
    parts = " + ".join(f"{name} {nbytes}" for name, nbytes in compute._asdict().items())
    return (
        f"compute buffers for {context.room.microbatch} tokens on {context.room.full} cells ="
        f" {parts} = {compute.nbytes} bytes",
        f"peak = weights, caches and states {rest} + compute {compute.nbytes}"
        f" = {rest + compute.nbytes} bytes",
    )
