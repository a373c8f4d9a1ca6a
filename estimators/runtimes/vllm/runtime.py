"""vLLM on an NVIDIA GPU: of a share of its memory, what weights and a profiled run leave is a pool.

Source: vLLM 0.33.0 (4ba787ec9); vllm/v1/worker/gpu_worker.py, determine_available_memory.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    KVBuffer,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base import dtypes
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.context import AutoContext
from memfit.estimators.results.estimate import MemoryPool, Note
from memfit.estimators.results.terms import PeakMoment
from memfit.estimators.runtimes.activation_bound import activation_bound
from memfit.estimators.runtimes.auto_context import within
from memfit.estimators.runtimes.facets import (
    ForeignFormats,
    NvidiaOnly,
    PerMachine,
    Pool,
    ProgramContext,
)
from memfit.estimators.runtimes.interface import MemoryFigures, Subject
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.token_cache import TokenCacheModel
from memfit.estimators.runtimes.token_cost import attention_buffers
from memfit.estimators.runtimes.vllm.pool import BLOCK, BlockLayout, block_layout, graph_counts
from memfit.estimators.runtimes.vllm.weights import computed_dtype, vllm_footprint

_GIB = 2**30
_MIB = 2**20
_FLOAT8_BITS = 8
_FLOAT8_TYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")  # config/cache.py, CacheDType; one byte each
# engine/arg_utils.py, get_batch_defaults for a server: from this memory on, the tokens of a batch
# and its requests; an A100 and a GB10 stay with the least.
_BATCHES = ((160 * _GIB, 16384, 1024), (70 * _GIB, 8192, 1024), (0, 2048, 256))
_SMALL_BATCHES = (80, 121)
# config/vllm.py, _set_cudagraph_sizes: the largest batch that is captured.
_GRAPH_TOKENS, _GRAPH_TOKENS_BLACKWELL = 512, 1024
_DATA_CENTER_BLACKWELL = (100, 103)
_GRAPH_BYTES = _MIB  # v1/worker/gpu/cudagraph_utils.py, _MIN_PER_GRAPH_BYTES
# Scheduled and not yet computed: scheduling is asynchronous (config/vllm.py,
# max_concurrent_batches).
_BATCHES_IN_FLIGHT = 2
# model_executor/models/config.py, mamba_ssm_cache_dtype of their configs; mamba_utils.py,
# kda_state_dtype. States of all others have the type of the activations.
_FLOAT32_STATES = ("qwen3_5", "qwen3_5_moe", "nemotron_h", "kimi_linear")
# v1/worker/gpu/sample: of each logit a float32 copy, a count, a float32 buffer and a mask's bit.
_SAMPLER_BYTES = 13
# layers/attention/mla_attention.py, determine_chunked_prefill_workspace_size.
_LATENT_TOKENS = 64 * 1024

_MOST_REQUESTS = 2**20


class VllmRuntime(Runtime, frozen=True, kw_only=True):
    """vLLM with the defaults that depend on the GPU."""

    requests: int = 256
    """The most requests at once, max_num_seqs."""
    max_requests: int | None = None
    """The same as it was set; None for what it is by default on a device."""

    def on(self, device: Device | None) -> "VllmRuntime":
        """Return it with the batches it takes by default on a device."""
        memory = device.memory_bytes if device else 0
        if device is not None and device.generation in _SMALL_BATCHES:
            memory = 0
        tokens, requests = next(rest for least, *rest in _BATCHES if memory >= least)
        return replace(self, prefill_step=tokens, requests=self.max_requests or requests)

    def with_setting(self, name: str, value: Any) -> Runtime:
        if name == "max_requests":
            if not 1 <= value <= _MOST_REQUESTS:
                raise InputError(f"{value}: give from 1 to {_MOST_REQUESTS}")
            return replace(self, max_requests=value, requests=value)
        if name != "kv_cache_dtype":
            return Runtime.with_setting(self, name, value)
        if value not in ("auto", *_FLOAT8_TYPES):
            raise InputError(
                f"{value[:40]!r} is not described; give auto or {', '.join(_FLOAT8_TYPES)}"
            )
        return replace(self, kv_bits=_FLOAT8_BITS if value in _FLOAT8_TYPES else None)


VLLM = VllmRuntime(
    name="vllm",
    version="0.33.0",
    prefill_step=2048,
    kv_step=BLOCK,
    kv_group_size=64,
    quantized_kv_start=0,
    growth="paged",
    charges="attention layers",
    budget=Budget("memory", 92),  # config/cache.py, gpu_memory_utilization
    shares_prefix=True,  # config/cache.py, enable_prefix_caching
    keeps="everything on the GPU, quantised weights packed",
    allocates="blocks of 16 tokens, from a pool that takes all the memory it may",
    source="https://github.com/vllm-project/vllm, vllm/v1 and vllm/config",
)


class Vllm(
    TokenCacheModel, Pool, ProgramContext, ForeignFormats, NvidiaOnly, PerMachine, frozen=True
):
    """vLLM; its cache is quantised to float8 only."""

    runtime: VllmRuntime

    defaults = VLLM
    kv_bits = (_FLOAT8_BITS,)

    @classmethod
    def loads(cls, checkpoint: Checkpoint) -> None:
        if checkpoint.source == "gguf":
            raise UnsupportedError(
                f"{checkpoint.id}: vllm loads no GGUF file; size the model it was made from"
            )

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> "Vllm":
        cls.loads(subject.checkpoint)
        footprint = vllm_footprint(subject.checkpoint, subject.model, subject.footprint)
        subject = replace(subject, footprint=footprint)
        assert isinstance(runtime, VllmRuntime)
        return cls(runtime, subject).on(subject.device)

    def on(self, device: Device | None) -> "Vllm":
        subject = replace(self.subject, device=device and _whole(device))
        return replace(self, runtime=self.runtime.on(device), subject=subject)

    def buffers(self) -> Iterator[KVBuffer]:
        """Return the buffers of all layers: of latent attention always the latent."""
        return attention_buffers(map(_on_latent, self.subject.model.mixers()))

    def token_bytes(self, workload: Workload, buffer: KVBuffer) -> int:
        """Return the bytes of a token in one buffer: one an element in float8."""
        if workload.kv_bits == _FLOAT8_BITS:
            return buffer.elements_per_token
        return dtypes.nbytes(buffer.elements_per_token, computed_dtype(self.subject.model))

    def window_capacity(self, workload: Workload, window: int) -> int:
        """Return the capacity. Source: SlidingWindowSpec.max_admission_blocks_per_request."""
        kept = window - 1 + _BATCHES_IN_FLIGHT * workload.prefill_step
        return BLOCK * (-(-kept // BLOCK) + 1)

    def figures(self, workload: Workload) -> MemoryFigures:
        layout, batch, tokens = self._layout(workload), workload.batch, workload.total_tokens
        costs = self.token_costs(workload)
        states = batch * layout.request_bytes(tokens, states=True)
        kv = KVCache(
            nbytes=batch * layout.request_bytes(tokens, states=False),
            held_bytes=batch * sum(cost.needed_bytes(tokens) for cost in costs),
            bytes_per_token=sum(cost.bytes_per_token for cost in costs),
            held_tokens=max((cost.needed_tokens(tokens) for cost in costs), default=0),
            allocated_tokens=layout.allocated_tokens(tokens),
        )
        work = self.activations(workload) + self.graphs(workload)
        total = self.resident_bytes() + kv.nbytes + states + work
        sizes = self.subject.footprint.sizes
        moment = PeakMoment(
            "prefill",
            total,
            work,
            max((*sizes, kv.nbytes)),
            "weight or cache",
            tuple(self._lines(workload, layout, kv.nbytes + states, total)),
        )
        return MemoryFigures(kv, states, moment)

    def _layout(self, workload: Workload) -> BlockLayout:
        model = self.subject.model
        return block_layout(
            self.token_costs(workload),
            [page for mixer in model.mixers() if (page := self._state_bytes(mixer))],
            in_flight=_BATCHES_IN_FLIGHT * workload.prefill_step,
        )

    def _state_bytes(self, mixer: Mixer) -> int:
        wide = self.subject.model.model_type in _FLOAT32_STATES
        return sum(s.elements * (4 if wide and s.float32 else self._width) for s in mixer.states())

    @property
    def _width(self) -> int:
        return dtypes.nbytes(1, computed_dtype(self.subject.model))

    def activations(self, workload: Workload) -> int:
        """Return a bound of the profiled run: a full batch, then logits of all requests."""
        model, width, rows = self.subject.model, self._width, workload.prefill_step
        layers = activation_bound(model, rows=rows, logit_rows=0, width=width)
        hidden = 2 * rows * model.hidden_size * width
        sampler = min(self.runtime.requests, rows) * model.vocab_size * (width + _SAMPLER_BYTES)
        return max(layers + self._expanded_bytes(), hidden + sampler)

    def _expanded_bytes(self) -> int:
        """Keys and values of all heads that a layer of latent attention computes at once."""
        limit = self.subject.model.max_context
        tokens = min(_LATENT_TOKENS, 8 * limit) if limit else _LATENT_TOKENS
        widest = max(map(_expanded_width, self.subject.model.mixers()), default=0)
        return tokens * self._width * widest

    def graphs(self, workload: Workload) -> int:
        """Return what CUDA graphs are charged: their buffers, and the least that each takes."""
        model, rows = self.subject.model, self._largest_graph(workload)
        buffers = activation_bound(model, rows=rows, logit_rows=0, width=self._width)
        return buffers + sum(self._graph_counts(workload)) * _GRAPH_BYTES

    def _largest_graph(self, workload: Workload) -> int:
        device = self.subject.device
        is_blackwell = device is not None and device.generation in _DATA_CENTER_BLACKWELL
        most = _GRAPH_TOKENS_BLACKWELL if is_blackwell else _GRAPH_TOKENS
        return min(most, 2 * self.runtime.requests, workload.prefill_step)

    def _graph_counts(self, workload: Workload) -> tuple[int, int]:
        return graph_counts(self._largest_graph(workload), self.runtime.requests)

    def pool(self, workload: Workload, *, draft_bytes: int = 0) -> MemoryPool | None:
        """Return what a device's budget leaves for the cache, and what that holds.

        With a draft model it is an upper bound: what its cache, activations and graphs take of it
        is not described.
        """
        device = self.subject.device
        if device is None:
            return None
        layout, tokens = self._layout(workload), workload.total_tokens
        budget, weights = self.runtime.budget.of_device(device), self.resident_bytes()
        activations, graphs = self.activations(workload), self.graphs(workload)
        left = max(0, budget - weights - draft_bytes - activations - graphs)
        request = layout.request_bytes(tokens)
        blocks = left // layout.block_bytes if layout.block_bytes else 0
        # core/kv_cache_utils.py, get_kv_cache_capacity: of requests of this length.
        requests = blocks * layout.block_bytes // request if request else 0
        return MemoryPool(
            budget_bytes=budget,
            weights_bytes=weights,
            activation_bytes=activations,
            graph_bytes=graphs,
            draft_bytes=draft_bytes,
            pool_bytes=left,
            block_bytes=layout.block_bytes,
            request_bytes=request,
            tokens=blocks * layout.block_bytes * tokens // request if request else 0,
            requests=min(requests, self.runtime.requests),
        )

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> AutoContext:
        """Return the longest request that the pool holds."""
        left = self._left_bytes(device, workload)
        tokens = self._layout(workload).longest(left, most)
        return within(AutoContext(left, tokens, tokens), longest)

    def program_context(self, workload: Workload, *, fitted: bool) -> int:
        """Return the model's own context, or with --max-model-len auto what the pool holds."""
        device, most = self.subject.device, workload.total_tokens
        if not fitted or device is None:
            return most
        longest = self._layout(workload).longest(self._left_bytes(device, workload), most)
        return max(1, longest)

    def _left_bytes(self, device: Device, workload: Workload) -> int:
        work = self.activations(workload) + self.graphs(workload)
        return max(0, self.runtime.budget.of_device(device) - self.resident_bytes() - work)

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield that nothing is known of it on a Mac."""
        yield from super()._notes(workload, figures)
        if self.subject.device and self.subject.device.backend == "metal":
            text = "vllm is described for NVIDIA GPUs; what it does on a Mac is not known"
            yield Note("warning", "not-on-macs", text)

    def _allocation(self) -> Iterator[str]:
        yield f"vllm: {self.runtime.allocates}; keeps {self.runtime.keeps}"
        if self.subject.device is None:
            yield "no device is named: the batches are those of a GPU with less than 70 GiB"
        yield (
            "the activations are an upper bound: all results of the widest layer for"
            " --max-num-batched-tokens, or the logits of --max-num-seqs requests if those are more"
        )
        yield (
            "CUDA graphs can take more: 1 MiB for each is the least that vllm charges, which"
            " measures them at its start; their buffers are an upper bound"
        )
        yield "not counted: what the CUDA driver and libraries take while kernels are loaded"

    def _lines(
        self, workload: Workload, layout: BlockLayout, cached: int, total: int
    ) -> Iterator[str]:
        captured, decoding = self._graph_counts(workload)
        yield (
            f"blocks = {layout.request_bytes(workload.total_tokens)} bytes a request of"
            f" {workload.total_tokens} tokens, {layout.block_bytes} bytes each, x batch"
            f" {workload.batch} = {cached} bytes"
        )
        yield (
            f"activations <= {self.activations(workload)} bytes in a batch of"
            f" {workload.prefill_step} tokens, with logits of {self.runtime.requests} requests"
        )
        yield (
            f"CUDA graphs = buffers of {self._largest_graph(workload)} tokens"
            f" + {captured} + {decoding} graphs x {_GRAPH_BYTES}"
            f" = {self.graphs(workload)} bytes"
        )
        yield f"peak = weights {self.resident_bytes()} + these three = {total} bytes"


def _whole(device: Device) -> Device:
    """A GPU without the limit that MLX sets itself."""
    if device.backend != "cuda":
        return device
    return replace(device, working_set_bytes=device.memory_bytes, budget="memory", note=None)


def _on_latent(mixer: Mixer) -> Mixer:
    """Latent attention as vLLM caches it."""
    match mixer:
        case LatentAttention():
            return replace(mixer, caches_expanded=False)
        case Attention() | GatedDelta() | Recurrent() | TracedMixer():
            return mixer
        case _:
            assert_never(mixer)


def _expanded_width(mixer: Mixer) -> int:
    """Elements of a token's keys and values of all heads, with its latent."""
    match mixer:
        case LatentAttention():
            expanded = mixer.heads * (mixer.nope_dim + mixer.value_dim)
            return expanded + mixer.latent_dim + mixer.rope_dim
        case Attention() | GatedDelta() | Recurrent() | TracedMixer():
            return 0
        case _:
            assert_never(mixer)
