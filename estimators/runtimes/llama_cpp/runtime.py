"""llama.cpp: everything is allocated before the first token, for the whole context."""

import shlex
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from memfit.estimators.arch.fields import MAX_LAYERS
from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import ceil_div, open_limit, open_size, round_up
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.context import AutoContext
from memfit.estimators.results.estimate import MemoryShare, Note
from memfit.estimators.results.terms import Basis, PeakMoment
from memfit.estimators.runtimes.facets import (
    Commands,
    Drafting,
    HostReads,
    ProgramContext,
    SplitMemory,
)
from memfit.estimators.runtimes.interface import DraftFigures, Figure, MemoryFigures, RuntimeModel
from memfit.estimators.runtimes.llama_cpp.builder import Context
from memfit.estimators.runtimes.llama_cpp.caches import (
    cache_lines,
    cache_types,
    caches,
    can_be_fused,
    cell_widths,
    recurrent_bytes,
    require_possible,
)
from memfit.estimators.runtimes.llama_cpp.compute import compute_buffers, has_gap
from memfit.estimators.runtimes.llama_cpp.ggml import Place, Sizes
from memfit.estimators.runtimes.llama_cpp.host import Host, host_of, host_text, weights_read
from memfit.estimators.runtimes.llama_cpp.placement import (
    ALIGNMENT,
    Placement,
    Weights,
    config_weights,
    file_weights,
    layer_lines,
)
from memfit.estimators.runtimes.llama_cpp.prediction import (
    kept_states,
    prediction_buffers,
    prediction_layers,
)
from memfit.estimators.runtimes.llama_cpp.projector import projector_bytes
from memfit.estimators.runtimes.llama_cpp.reserved import (
    Compute,
    explained,
    prediction_note,
    projector_note,
)
from memfit.estimators.runtimes.llama_cpp.settings import LlamaCppRuntime, cells
from memfit.estimators.runtimes.runtime import Budget, HostNeed, Runtime
from memfit.estimators.runtimes.token_cache import TokenCacheModel
from memfit.estimators.runtimes.token_cost import TokenCost

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
# The largest error against build b11549 in percent (benchmarks/llama_differential.py); of a
# checkpoint that is not a GGUF file small operations of the architecture are not known.
_ERROR, _CONVERTED_ERROR = 10, 20
_LEFT_FREE = 2**30  # common/common.h, fit_params_target
_FIT_CONTEXT = 4096  # common/common.h, fit_params_min_ctx


class LlamaCpp(TokenCacheModel, SplitMemory, Commands, Drafting, ProgramContext, frozen=True):
    """llama.cpp on a GGUF file, or on the conversion of a checkpoint."""

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

    @property
    def is_split(self) -> bool:
        """Whether figures are of the GPU's memory alone: it is apart, or layers were divided."""
        settings, backend = self.settings, self.subject.backend
        divided = settings.gpu_layers is not None or settings.host_experts
        return backend == "cuda" or (bool(divided) and backend != "cpu")

    @property
    def weights(self) -> Weights:
        subject, footprint = self.subject, self.subject.footprint
        if self.is_gguf:
            trunk = MAX_LAYERS if self.settings.drafted else len(subject.model.layers)
            return file_weights(subject.checkpoint.tensors or (), trunk)
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
        return Placement(backend, blocks, layers, min(settings.host_experts, blocks))

    @property
    def host(self) -> Host | None:
        """The host of a GPU, None where there is none with a memory of its own."""
        return host_of(self.subject.device, self.settings)

    @property
    def is_divided(self) -> bool:
        """Whether a part of the model that could be on the GPU is on the host."""
        placement = self.placement
        hosted = placement.host_experts and self.subject.model.experts()
        return self.is_split and (placement.gpu_layers <= placement.blocks or bool(hosted))

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

    def divisions(self) -> Iterator[Sequence[tuple[dict[str, int], Runtime]]]:
        """Yield experts of ever more layers on the host, then ever fewer layers on the GPU."""
        settings, blocks = self.settings, self.placement.blocks
        is_set = settings.gpu_layers is not None or settings.automatic or settings.host_experts
        if is_set or self.host is None:
            return
        experts = {"host_experts": blocks} if self.subject.model.experts() else {}
        if experts:
            yield [self._division(host_experts=layers) for layers in range(1, blocks + 1)]
        yield [self._division(gpu_layers=layers, **experts) for layers in range(blocks, -1, -1)]

    def _division(self, **layers: int) -> tuple[dict[str, int], Runtime]:
        return layers, replace(self.settings, **layers)

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

    def _used(self, compute: Compute) -> int:
        """The bytes of the compute buffers that figures count."""
        return compute.on_gpu if self.is_split else compute.nbytes

    def _in(self, place: Place) -> Model:
        model, placement = self._contexts, self.placement
        layers = enumerate(model.layers)
        return replace(model, layers=tuple(x for i, x in layers if placement.of(i) is place))

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield whether a Mac has room for what is on its GPU and on its host together."""
        yield from super()._notes(workload, figures)
        if note := projector_note(self._projector_bytes):
            yield note
        predicts = self.is_gguf and self._blocks > len(self.subject.model.layers)
        if predicts and not self.settings.drafted:
            yield prediction_note(recurrent_bytes(self.subject.model, workload.batch))
        wanted = min(workload.prefill_step, workload.batch * workload.total_tokens)
        if wanted > self.settings.batch:
            text = (
                f"llama.cpp computes at most its batch at once, {self.settings.batch} tokens;"
                f" for a micro-batch of {wanted} give -b {wanted} too"
            )
            yield Note("warning", "micro-batch", text)
        device, both = self.subject.device, self.shared_bytes(figures)
        need = self.host_need(figures.host_bytes)
        if need and need.is_undecided:
            text = (
                f"the host has to hold {open_size(need.nbytes)}, and its memory is not"
                " known: --host-memory gives it"
            )
            yield Note("warning", "host-memory", text)
        if device and both > device.memory_bytes:
            text = (
                f"GPU and host share {open_limit(device.memory_bytes)} here; together they"
                f" need {open_size(both)}"
            )
            yield Note("warning", "runtime-budget", text)

    def settled(self, workload: Workload) -> Runtime:
        """Return llama.cpp with the most layers on the GPU that leave what its --fit leaves.

        Without a device there is nothing to fit, and without a GPU no layer to place.
        """
        device = self.subject.device
        if not self.settings.automatic or device is None or device.backend == "cpu":
            return self.runtime
        if self._leaves_enough(workload):
            return self.runtime
        for layers in range(self.placement.blocks, 0, -1):
            chosen = replace(self.settings, gpu_layers=layers)
            if replace(self, runtime=chosen)._leaves_enough(workload):
                return chosen
        return replace(self.settings, gpu_layers=0)

    def _leaves_enough(self, workload: Workload) -> bool:
        device = self.subject.device
        assert device
        return self.figures(workload).moment.nbytes + _LEFT_FREE <= device.working_set_bytes

    def program_context(self, workload: Workload, *, fitted: bool) -> int:
        """Return a sequence's part of the model's context, or of the longest that --fit keeps.

        Source: common/fit.cpp: whole steps of 256 cells, and at least 4096; below that it moves
        layers. It interpolates where memfit searches.
        """
        sequences, device = workload.batch, self.subject.device

        def part(tokens: int) -> int:
            return ceil_div(tokens, sequences)

        most = workload.total_tokens

        def is_longer(steps: int) -> bool:
            return not self._leaves_enough(replace(workload, prompt_tokens=part(steps * step)))

        step = self.settings.kv_step
        if not fitted or device is None or device.backend == "cpu" or most <= _FIT_CONTEXT:
            return part(most)
        if self._leaves_enough(replace(workload, prompt_tokens=part(most))):
            return part(most)
        least = _FIT_CONTEXT // step
        steps = range(least + 1, most // step + 1)
        return part((least + bisect_left(steps, True, key=is_longer)) * step)

    def runs_kv_bits(self, workload: Workload) -> bool:
        """Whether the types of its cache were left open."""
        return self.settings.types is None

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        """Return the command of llama-server (common/arg.cpp); its context is of all sequences."""
        if not self.is_gguf:
            return ()
        types, sequences = cache_types(workload, self.settings.types), workload.batch
        context = sequences * workload.total_tokens
        command = ["llama-server", "-m", model, "-c", str(context), "-np", str(sequences)]
        if self.settings.batch != LLAMA_CPP.batch:
            command += ["-b", str(self.settings.batch)]
        command += ["-ub", str(workload.prefill_step)]
        if types != cache_types(replace(workload, kv_bits=None), None):
            command += ["-ctk", types.keys, "-ctv", types.values]
        if not self.settings.flash:
            command += ["-fa", "off"]
        command += ["--kv-unified"] * self.settings.unified
        command += ["--swa-full"] * self.settings.swa_full
        if tokens := self.settings.drafted:
            command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(tokens)]
        placement = self.placement
        # Without it, --fit moves layers to the host where less than 1 GiB is left (common/fit.cpp).
        if self.host or self.settings.gpu_layers is not None:
            command += ["-ngl", str(placement.gpu_layers)]
        if placement.host_experts:
            command += ["-ncmoe", str(placement.host_experts)]
        return (shlex.join(command),)

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
        return Compute(sizes.gpu, sizes.host, output, self._projector_bytes or 0)

    @property
    def _projector_bytes(self) -> int | None:
        """What a vision projector computes with, 0 without one, None where it is not known."""
        checkpoint, backend = self.subject.checkpoint, self.subject.backend
        return projector_bytes(checkpoint.config, backend, checkpoint.config_name)

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return what a figure rests on; a vision projector's buffer is a bound."""
        if figure != "workspace":
            return TokenCacheModel.basis(self, figure, workload)
        is_bound = self._projector_bytes != 0 or bool(self.settings.drafted)
        if is_bound or has_gap(self.subject.model, self.placement):
            return "bound", 0
        return "derived", _ERROR if self.is_gguf else _CONVERTED_ERROR

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> AutoContext:
        """Return the model's own context, and the longest that fits."""
        reason = ""
        if most > longest:
            reason = f"llama.cpp takes the model's own {most} tokens unless a context is set"
        return AutoContext(self.runtime.budget.of_device(device), most, longest, reason)

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        context = self._context(workload)
        if not self.is_gguf:
            yield from super()._assumptions(workload)
        yield (
            f"llama.cpp's context is as long as the workload: {context.room.full} cells for"
            f" {'all' if context.room.unified else 'each'} of {context.room.sequences} sequences,"
            f" keys in {context.types.keys} and values in {context.types.values}"
        )
        yield f"flash attention is {'on' if context.flash else 'off'}; {self._placed()}"
        if self.host and self.is_split:
            yield host_text(self.host)
        yield self._logits(workload)
        basis, percent = self.basis("workspace", workload)
        if basis == "derived":
            yield (
                f"the compute buffers are within {percent} % of those of llama.cpp"
                f" {self.runtime.version}; other builds were not compared"
            )

    def _logits(self, workload: Workload) -> str:
        if self.settings.all_logits:
            return (
                "the compute buffers have room for the logits of a whole micro-batch, as llama.cpp"
                " reserves them for a library; llama-server needs less"
            )
        own = replace(self, runtime=replace(self.settings, all_logits=True))
        all_, few = (each._compute(each._context(workload)).nbytes for each in (own, self))
        return (
            "the compute buffers have room for the logits of one token of each sequence, as"
            f" llama-server reserves them; a library's context takes {open_size(all_ - few)} more"
            f" ({setting('all_logits')})"
        )

    def _placed(self) -> str:
        placement = self.placement
        if not self.is_split:
            return "everything is in one memory"
        text = f"{placement.gpu_layers} of {placement.blocks + 1} layers are on the GPU"
        if self.settings.host_experts:
            text += f", the experts of the first {self.settings.host_experts} on the host"
        if self.settings.automatic:
            text += ", the most that leave 1 GiB free, as --fit does"
        return f"{text}; the figures are of the GPU's memory"

    def _allocation(self) -> Iterator[str]:
        if not self.is_gguf:
            yield f"llama.cpp: {self.runtime.allocates}"
            yield "llama.cpp loads GGUF files: a conversion's weights will have other sizes"

    def _explanation(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        footprint = self.subject.footprint
        where = "those on the GPU, the head's included" if self.is_split else "all"
        yield (
            f"resident weights = {footprint.loaded_bytes} bytes, each of"
            f" {footprint.sizes.total()} tensors rounded up to 32 bytes, {where}"
            f" = {self.resident_bytes()} bytes"
        )
        room, types, flash, *_ = self._context(workload)
        tokens = workload.total_tokens
        yield from cache_lines(self.subject.model, room, types, tokens, flash=flash)
        if self.is_split:
            yield from layer_lines(self.weights, self.placement, len(self.subject.model.layers))
