"""llama.cpp: everything is allocated before the first token, for the whole context."""

from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.estimate import MemoryShare
from memfit.estimators.results.terms import Basis, PeakMoment
from memfit.estimators.runtimes.facets import (
    Drafting,
    HostReads,
)
from memfit.estimators.runtimes.interface import DraftFigures, Figure, MemoryFigures, RuntimeModel
from memfit.estimators.runtimes.llama_cpp.builder import Context
from memfit.estimators.runtimes.llama_cpp.caches import (
    caches,
    require_possible,
)
from memfit.estimators.runtimes.llama_cpp.compute import is_bound
from memfit.estimators.runtimes.llama_cpp.fitting import Fitted
from memfit.estimators.runtimes.llama_cpp.ggml import Place
from memfit.estimators.runtimes.llama_cpp.host import host_of, weights_read
from memfit.estimators.runtimes.llama_cpp.reserved import (
    Compute,
    explained,
)
from memfit.estimators.runtimes.token_cache import TokenCacheModel

# The largest error against build b11549 in percent (benchmarks/llama_differential.py); of a
# checkpoint that is not a GGUF file small operations of the architecture are not known.
_ERROR, _CONVERTED_ERROR = 10, 20


class LlamaCpp(Fitted, Drafting, frozen=True):
    """llama.cpp on a GGUF file, or on the conversion of a checkpoint."""

    def figures(self, workload: Workload) -> MemoryFigures:
        if workload.max_kv_size is not None:
            raise UnsupportedError("llama.cpp has no rotating cache: leave out max_kv_size")
        context = self._context(workload)
        require_possible(self.subject.model, context.types, flash=context.flash)
        host_of(self.subject.device, self.settings)
        model = self._in(Place.GPU) if self.is_split else self._contexts
        room, types, tokens = context.room, context.types, workload.total_tokens
        kept = caches(model, room, types, tokens, flash=context.flash)
        states = self._states(model, room.sequences)
        compute = self._compute(context)
        used = self._used(compute)
        rest = self.resident_bytes() + kept.nbytes + states
        moment = PeakMoment(
            phase="prefill",
            nbytes=rest + used,
            workspace_bytes=used,
            largest_buffer_bytes=max([*self.subject.footprint.sizes, *compute, kept.nbytes]),
            largest_buffer="compute buffer",
            explanation=explained(compute, context, rest, used),
        )
        kv = KVCache(
            nbytes=kept.nbytes,
            held_bytes=kept.held_bytes,
            bytes_per_token=kept.bytes_per_token,
            held_tokens=kept.held_tokens,
            allocated_tokens=kept.cells,
        )
        if not self.is_split:
            return MemoryFigures(kv, states, moment)
        on_host = self._share(Place.HOST, context, tokens, compute)
        return MemoryFigures(kv, states, moment, on_host.total_bytes)

    def memories(self, workload: Workload) -> tuple[MemoryShare, ...]:
        if not self.is_split:
            return ()
        context = self._context(workload)
        compute, tokens = self._compute(context), workload.total_tokens
        return tuple(
            self._share(place, context, tokens, compute) for place in (Place.GPU, Place.HOST)
        )

    def host_reads(self, workload: Workload) -> HostReads | None:
        host = self.host
        if host is None or not self.is_split:
            return None
        prompt, model = replace(workload, max_tokens=0), self._in(Place.HOST)
        context = self._context(prompt)
        tokens = prompt.total_tokens
        kept = caches(model, context.room, context.types, tokens, flash=context.flash)
        states = self._states(model, context.room.sequences)
        read = weights_read(self.subject.model, self.weights, self.placement)
        return HostReads(read + kept.held_bytes + states, host.bandwidth_bytes)

    def _share(self, place: Place, context: Context, tokens: int, compute: Compute) -> MemoryShare:
        model, room, device = self._in(place), context.room, self.subject.device
        kept = caches(model, room, context.types, tokens, flash=context.flash).nbytes
        states = self._states(model, room.sequences)
        weights = self.weights.by_place(self.placement)[place]
        used = compute.on_gpu if place is Place.GPU else compute.on_host
        memory = device.memory_bytes if device else None
        if self.host:
            memory = self.host.memory_bytes
        return MemoryShare(
            name="GPU" if place is Place.GPU else "host",
            layers=len(model.layers),
            weights_bytes=weights,
            cache_bytes=kept,
            state_bytes=states,
            compute_bytes=used,
            total_bytes=weights + kept + states + used,
            memory_bytes=device.working_set_bytes if device and place is Place.GPU else memory,
        )

    def drafted(self, workload: Workload, draft: RuntimeModel, tokens: int) -> DraftFigures:
        """Return what a draft model adds: a context of its own as long, with a cache in f16.

        Source: common/speculative.cpp. All its layers are on the GPU, and it has logits of one
        token for each sequence; the target has those of the ``tokens`` that it checks too.
        """
        assert isinstance(draft, LlamaCpp)
        own = replace(
            self.settings,
            types=None,
            gpu_layers=None,
            automatic=False,
            host_experts=0,
            all_logits=False,
            drafted=0,
        )
        alone = replace(draft, runtime=own)
        unquantised = replace(workload, kv_bits=None)
        figures = alone.figures(unquantised)
        checked = self._used(self._compute(self._context(workload, drafted=tokens)))
        more = max(0, checked - self._used(self._compute(self._context(workload))))
        nbytes = figures.moment.nbytes + more
        cells = alone._context(unquantised).room.full
        line = (
            f"a context of {cells} cells in f16 with all its layers on the GPU"
            f" {figures.moment.nbytes} + logits of {tokens} drafted tokens of each sequence {more}"
            f" = {nbytes} bytes"
        )
        return DraftFigures(nbytes, "derived", "prefill", line, figures.host_bytes)

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return what a figure rests on; a vision projector's buffer is a bound."""
        if figure != "workspace":
            return TokenCacheModel.basis(self, figure, workload)
        has_more = self._projector_bytes != 0 or bool(self.settings.drafted)
        if has_more or is_bound(self.subject.model, self.placement):
            return "bound", 0
        return "derived", _ERROR if self.is_gguf else _CONVERTED_ERROR
