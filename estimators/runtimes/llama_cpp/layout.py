"""Where llama.cpp has a model: its weights, caches and buffers, in one memory or two."""

from collections import Counter

from msgspec.structs import replace

from memfit.estimators.arch.fields import MAX_LAYERS
from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import ceil_div, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.llama_cpp.builder import Context
from memfit.estimators.runtimes.llama_cpp.caches import (
    cache_types,
    can_be_fused,
    cell_widths,
    recurrent_bytes,
)
from memfit.estimators.runtimes.llama_cpp.compute import compute_buffers
from memfit.estimators.runtimes.llama_cpp.ggml import Place, Sizes
from memfit.estimators.runtimes.llama_cpp.host import Host, host_of
from memfit.estimators.runtimes.llama_cpp.placement import (
    ALIGNMENT,
    Placement,
    Weights,
    config_weights,
    file_weights,
)
from memfit.estimators.runtimes.llama_cpp.prediction import (
    kept_states,
    prediction_buffers,
    prediction_layers,
)
from memfit.estimators.runtimes.llama_cpp.projector import projector_bytes
from memfit.estimators.runtimes.llama_cpp.reserved import (
    Compute,
)
from memfit.estimators.runtimes.llama_cpp.settings import LLAMA_CPP, LlamaCppRuntime, cells
from memfit.estimators.runtimes.runtime import HostNeed
from memfit.estimators.runtimes.token_cache import TokenCacheModel
from memfit.estimators.runtimes.token_cost import TokenCost

_FLOAT = 4


class LlamaCppLayout(TokenCacheModel, frozen=True):
    """llama.cpp's placement of a model, and what it reserves."""

    defaults = LLAMA_CPP

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
        return self.settings.flash and all(map(can_be_fused, mixers))

    @property
    def is_split(self) -> bool:
        """Whether figures are of the GPU's memory alone: it is apart, or layers were divided."""
        settings, backend = self.settings, self.subject.backend
        divided = settings.gpu_layers is not None or settings.host_experts or settings.is_placed
        return backend == "cuda" or (bool(divided) and backend != "cpu")

    @property
    def weights(self) -> Weights:
        subject, footprint = self.subject, self.subject.footprint
        if self.is_gguf:
            trunk = MAX_LAYERS if self.settings.drafted else len(subject.model.layers)
            named = bool(self.settings.overrides)
            return file_weights(subject.checkpoint.tensors or (), trunk, named=named)
        if self.settings.overrides:
            raise UnsupportedError(
                f"{setting('override_tensor')}: it places tensors of a GGUF file by their names"
            )
        return config_weights(subject.model, footprint.plan, footprint.loaded_bytes)

    @property
    def placement(self) -> Placement:
        """Which layers are on the GPU: all, unless fewer were asked for.

        Raises:
            UnsupportedError: when layers were asked for and there is no GPU.
        """
        settings, backend = self.settings, self.subject.backend
        blocks = self._blocks
        asked = blocks + 1 if settings.gpu_layers is None else settings.gpu_layers
        if backend == "cpu" and settings.gpu_layers and not settings.automatic:
            raise UnsupportedError(f"{setting('gpu_layers')}: this machine has no GPU")
        layers = 0 if backend == "cpu" else min(asked, blocks + 1)
        return Placement(
            backend,
            blocks,
            layers,
            min(settings.host_experts, blocks),
            settings.overrides,
            settings.kv_offload,
            settings.projector_offload,
        )

    @property
    def host(self) -> Host | None:
        """The host of a GPU, None where there is none with a memory of its own."""
        return host_of(self.subject.device, self.settings)

    @property
    def is_divided(self) -> bool:
        """Whether a part of the model that could be on the GPU is on the host."""
        placement = self.placement
        hosted = placement.host_experts and self.subject.model.experts()
        divided = placement.gpu_layers <= placement.blocks or self.settings.is_placed
        return self.is_split and (divided or bool(hosted))

    def resident_bytes(self) -> int:
        """Return the weights with each tensor at its alignment; on the GPU, where it is split."""
        if self.is_split:
            return self.weights.by_place(self.placement)[Place.GPU]
        sizes = self.subject.footprint.sizes
        trunk = sum(count * round_up(size, ALIGNMENT) for size, count in sizes.items())
        return trunk + self._prediction_bytes

    @property
    def _prediction_bytes(self) -> int:
        """The weights of prediction layers, where the file's own draft."""
        if not self.settings.drafted:
            return 0
        blocks = range(len(self.subject.model.layers), self.weights.blocks)
        everywhere = (self.weights.of_layer(index, self.placement) for index in blocks)
        return sum(sum(places.values()) for places in everywhere)

    @property
    def _contexts(self) -> Model:
        """The model with the prediction layers that draft, which have a context of their own."""
        model = self.subject.model
        if not self.settings.drafted:
            return model
        return replace(model, layers=(*model.layers, *prediction_layers(model, self._blocks)))

    @property
    def _blocks(self) -> int:
        return self.weights.blocks if self.is_gguf else len(self.subject.model.layers)

    def _states(self, model: Model, sequences: int) -> int:
        """The bytes of the recurrent states of a part of the model's layers."""
        return recurrent_bytes(model, sequences) * kept_states(model, self.settings.drafted)

    def _used(self, compute: Compute) -> int:
        """The bytes of the compute buffers that figures count."""
        return compute.on_gpu if self.is_split else compute.nbytes

    def _in(self, place: Place) -> Model:
        model, placement = self._contexts, self.placement
        layers = enumerate(model.layers)
        return replace(model, layers=tuple(x for i, x in layers if placement.of_cache(i) is place))

    def _context(self, workload: Workload, *, drafted: int = 0) -> Context:
        """The context that llama.cpp makes; a draft's tokens have logits too.

        Source: tools/server/server-context.cpp, server_output_limits, and common/speculative.cpp,
        common_speculative_get_output_limits.
        """
        room = cells(workload, self.settings)
        types = cache_types(workload, self.settings.types)
        checked = drafted or self.settings.drafted
        few = min(room.sequences * (1 + checked), room.microbatch)
        outputs = room.microbatch if self.settings.all_logits else few
        return Context(room, types, self.flash, outputs)

    def _compute(self, context: Context) -> Compute:
        model = self.subject.model
        sizes = compute_buffers(model, context, self.weights, self.placement)
        output = _FLOAT * model.vocab_size * context.room.sequences
        if tokens := self.settings.drafted:
            # The target computes logits of the drafted tokens too; the prediction layers do not.
            own = context._replace(outputs=context.room.sequences)
            more = prediction_buffers(model, tokens, own, self.weights, self.placement)
            sizes = Sizes(gpu=sizes.gpu + more.gpu, host=sizes.host + more.host)
            output *= 2 + tokens
        projector, on_gpu = self._projector_bytes or 0, self.settings.projector_offload
        return Compute(
            sizes.gpu,
            sizes.host,
            output + (0 if on_gpu else projector),
            projector if on_gpu else 0,
        )

    @property
    def _projector_bytes(self) -> int | None:
        """What a vision projector computes with, 0 without one, None where it is not known."""
        checkpoint, backend = self.subject.checkpoint, self.subject.backend
        return projector_bytes(checkpoint.config, backend, checkpoint.config_name)

    def token_costs(self, workload: Workload) -> tuple[TokenCost, ...]:
        types = cache_types(workload, self.settings.types)
        room = cells(workload, self.settings)
        kinds = Counter(
            (sum(types.row_bytes(*widths)), None if room.swa_full else mixer.window)
            for mixer in self._contexts.mixers()
            for widths in (cell_widths(mixer) if mixer.owns_cache else ())
        )

        def share(window: int) -> int:
            """The part of one sequence in a cache that several may share."""
            return ceil_div(room.windowed(window) * room.streams, room.sequences)

        return tuple(
            TokenCost(layers, nbytes, window, share(window) if window else None)
            for (nbytes, window), layers in kinds.items()
        )

    def runs_kv_bits(self, workload: Workload) -> bool:
        """Whether the types of its cache were left open."""
        return self.settings.types is None

    def shared_bytes(self, figures: MemoryFigures) -> int:
        device = self.subject.device
        if not self.is_split or device is None or device.has_host:
            return 0
        return figures.moment.nbytes + figures.host_bytes

    def host_need(self, nbytes: int) -> HostNeed | None:
        host = self.host
        if host is None or not self.is_split:
            return None
        return HostNeed(nbytes, host.memory_bytes, self.is_divided)
