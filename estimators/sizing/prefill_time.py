"""How long a chunk of a prompt takes on a GPU of Apple: the products of its layers, and attention.

Prefill is limited by arithmetic: an operation takes its multiply-adds x 2 / (the share of the
GPU's peak that its kernel reaches), or the bytes that it moves / (the share of the bandwidth),
whichever is longer. The shares are constants of MLX's kernels, read from published runs:
`Rates`. benchmarks/prefill_speed.py compares them with runs that they were not read from.
"""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from memfit.estimators.arch.model import Layer, Model, Module, Part
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Mixer,
    MixtureOfExperts,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.mlx.kernels import AttentionCall, fused_kernel
from memfit.estimators.mlx.versions import Version
from memfit.estimators.weights.derived import QuantizationPlan


class Rates(Struct, frozen=True):
    """The shares of the peak that MLX's kernels reach, in percent, and the start of a run."""

    quantised: int
    plain: int
    attention: int
    """Of the fused kernel."""
    experts: int
    """Of full tiles of rows with one expert."""
    scores: int
    """Of the products of attention that is not fused."""
    start_seconds_per_gb: float = 0.0
    """What begins a run, by the bytes of the weights; no kernel explains it."""


# M1 to M4, of the GPU's fp32 peak. Quantised, plain and experts: the 11 rows of an M4 Max in
# mlx-lm's BENCHMARKS.md; experts with the tiles of `_tile_share` taken out. Attention: 4k and 128k
# tokens of a 70B model on an M3 Ultra (abhiramsalammagari.com, April 2026).
SIMD = Rates(quantised=80, plain=93, attention=75, experts=74, scores=93)
# M5, of the peak of its matrix units: runs of mlx_lm on an M5 Max (ax-engine, August 2026), and for
# long prompts mlx-lm#1480 and #1781.
MATRIX = Rates(
    quantised=74, plain=74, attention=89, experts=54, scores=45, start_seconds_per_gb=0.01
)
# Of the bandwidth; elementwise kernels are 1 to 3 % of a run, 13 % where scores are held.
_BANDWIDTH_PERCENT = 80
_KERNEL_SECONDS = 5e-6
# Passes over scores that are not fused: written, scaled and masked, and the softmax reads and
# writes them, before the second product reads them.
_SCORE_PASSES = 7
# gather_qmm_rhs walks sorted rows in tiles, once for each expert in a tile (mlx
# backend/metal/quantized.cpp: bm = 16; it is taken from 4 rows an expert on).
_TILE_ROWS = 16
_LEAST_ROWS = 4
_FUSED_WIDTH = 2
# Words of these bits hold whole weights; of 5 and 6 bits the same rows are 2 to 3 % slower.
_WHOLE_WORDS = (2, 4, 8)
_ODD_BITS_PERCENT = 97


class Gpu(Struct, frozen=True):
    """What a GPU can do in a second."""

    flops: float
    """Of the units that multiply matrices."""
    bytes: int
    rates: Rates
    has_matrix_units: bool


class Subject(Struct, frozen=True):
    """What runs, as `subject_of` gives it."""

    hidden_size: int
    layers: tuple[tuple[Layer, int], ...]
    """Those before the last that has a cache, and how many there are of each."""
    last: Layer
    plan: QuantizationPlan | None
    mlx: Version
    kv_bits: int | None


def subject_of(
    model: Model, plan: QuantizationPlan | None, mlx: Version, kv_bits: int | None = None
) -> Subject:
    """Return what of a model a chunk computes: what the caches need, and no more.

    Layers after the last that has a cache are left out, as those that share keys are (mlx-lm
    generate.py, generate_step, which evaluates the caches alone).
    """
    layers = model.layers
    caching = [number for number, each in enumerate(layers) if _has_cache(each)]
    last = caching[-1] if caching else len(layers) - 1
    # Formats of single modules differ by their path, which no layer has: those of the first count.
    counts = Counter(layers[:last])
    return Subject(model.hidden_size, tuple(counts.items()), layers[last], plan, mlx, kv_bits)


def _has_cache(layer: Layer) -> bool:
    return any(mixer.owns_cache for mixer in layer.mixers)


def chunk_seconds(subject: Subject, gpu: Gpu, tokens: int, position: int) -> float:
    """Return the seconds of a chunk of ``tokens`` with ``position`` tokens before it."""
    # Of the last layer the keys and values are computed, about half of what attention multiplies.
    last = _products(subject, gpu, subject.last, tokens, position)[Part.ATTENTION] / 2
    return last + sum(
        count * _layer(subject, gpu, layer, tokens, position) for layer, count in subject.layers
    )


def _layer(subject: Subject, gpu: Gpu, layer: Layer, tokens: int, position: int) -> float:
    seconds = sum(_mixer(subject, gpu, mixer, tokens, position) for mixer in layer.mixers)
    products = sum(_products(subject, gpu, layer, tokens, position).values())
    moved = _moved(gpu, _elementwise(subject.hidden_size, layer) * tokens)
    return seconds + products + moved + _KERNEL_SECONDS * len(layer.modules)


def _products(
    subject: Subject, gpu: Gpu, layer: Layer, tokens: int, position: int
) -> dict[Part, float]:
    """Return the seconds of a layer's matrix products by their part."""
    rates, seconds = gpu.rates, dict.fromkeys(Part, 0.0)
    for module in layer.modules:
        if len(module.shape) < 2 or not module.quantizable or not module.loaded:
            continue
        packed = subject.plan.quantization(module.path, module) if subject.plan else None
        percent = rates.quantised if packed else rates.plain
        if packed and packed.bits not in _WHOLE_WORDS:
            percent = percent * _ODD_BITS_PERCENT // 100
        rows, share = float(tokens), 1.0
        if module.part is Part.EXPERTS and layer.experts:
            rows, share, percent = _routed(layer.experts, module, tokens, percent, rates)
        elif len(module.shape) == 3 and tokens > 1:
            # Latent attention makes keys and values of all tokens again (deepseek_v3.py).
            rows = float(position + tokens)
        experts = module.shape[0] if module.part is Part.EXPERTS else 1
        read = module.elements * (packed.bits if packed else 16) / 8
        seconds[module.part] += max(
            2 * rows * (module.elements // experts) / (gpu.flops * percent / 100 * share),
            _moved(gpu, read),
        )
    return seconds


def _routed(
    experts: MixtureOfExperts, module: Module, tokens: int, percent: int, rates: Rates
) -> tuple[float, float, int]:
    """Return the rows of the chosen experts, the share of their tiles, and the kernel's rate."""
    rows, count = tokens * experts.top_k, module.shape[0]
    if rows // count < _LEAST_ROWS:
        return float(rows), 1 / _TILE_ROWS, rates.experts
    return float(rows), _tile_share(rows, count), rates.experts


def _tile_share(rows: int, experts: int) -> float:
    """Return how much of the work of tiles is of rows of the expert that is multiplied."""
    tiles = rows / _TILE_ROWS
    return tiles / (tiles + experts - 1)


def _mixer(subject: Subject, gpu: Gpu, mixer: Mixer, tokens: int, position: int) -> float:
    """Return the seconds of what a mixer does between its products."""
    match mixer:
        case Attention():
            kept = min(position, mixer.window - 1) if mixer.window else position
            return _attention(
                subject,
                gpu,
                (mixer.heads, mixer.kv_heads, mixer.key_dim, mixer.value_dim),
                (tokens, kept + tokens),
                has_array=bool(mixer.window and kept + tokens > mixer.window),
                may_fuse=mixer.fused and not mixer.float32,
            )
        case LatentAttention():
            keys = position + tokens
            scores = mixer.heads * tokens * keys
            # The scores of the rope part are a mask that is added (deepseek_v3.py).
            rope = 2 * scores * mixer.rope_dim / (gpu.flops * gpu.rates.scores / 100)
            width = mixer.nope_dim + (mixer.rope_dim if mixer.caches_expanded else 0)
            heads = (mixer.heads, mixer.heads, width, mixer.value_dim)
            return (
                rope
                + _moved(gpu, 3 * scores * _FUSED_WIDTH)
                + _attention(subject, gpu, heads, (tokens, keys), has_array=True, may_fuse=True)
            )
        case GatedDelta() | Recurrent() | TracedMixer():
            states = sum(state.elements for state in mixer.states())
            return tokens * states / (gpu.flops * gpu.rates.quantised / 100)
        case _:
            assert_never(mixer)


def _attention(
    subject: Subject,
    gpu: Gpu,
    heads: tuple[int, int, int, int],
    size: tuple[int, int],
    *,
    has_array: bool,
    may_fuse: bool,
) -> float:
    count, kv_count, key_dim, value_dim = heads
    tokens, keys = size
    call = AttentionCall(
        backend="metal",
        nax=gpu.has_matrix_units,
        query_tokens=tokens,
        key_tokens=keys,
        key_dim=key_dim,
        value_dim=value_dim,
        heads=count,
        kv_heads=kv_count,
        mask="array" if has_array else "causal",
    )
    widths = key_dim + value_dim
    if may_fuse and subject.kv_bits is None and fused_kernel(call, subject.mlx):
        # A causal kernel leaves out the blocks above the diagonal.
        read = keys if has_array else keys - tokens + (tokens + 1) / 2
        return 2 * count * tokens * read * widths / (gpu.flops * gpu.rates.attention / 100)
    scores = count * tokens * keys
    products = 2 * scores * widths / (gpu.flops * gpu.rates.scores / 100)
    return products + _moved(gpu, _SCORE_PASSES * scores * _FUSED_WIDTH)


def _moved(gpu: Gpu, nbytes: float) -> float:
    return nbytes / (gpu.bytes * _BANDWIDTH_PERCENT / 100)


def _elementwise(hidden_size: int, layer: Layer) -> int:
    """Return the bytes that norms, residuals, activations and caches move for a token."""
    elements = 10 * hidden_size + 3 * _widths(layer.modules, Part.ATTENTION)
    elements += 3 * _widths(layer.modules, Part.MLP) + 3 * _widths(
        layer.modules, Part.SHARED_EXPERTS
    )
    if layer.experts:
        # Rows are gathered for their experts, and their outputs are weighted and added up.
        rows = layer.experts.top_k * (5 * hidden_size + 3 * layer.experts.intermediate)
        elements += rows
    return _FUSED_WIDTH * elements


def _widths(modules: Iterable[Module], part: Part) -> int:
    """Return the outputs of a part's first products, of which two are of an MLP with a gate."""
    outputs = [m.shape[0] for m in modules if m.part is part and len(m.shape) == 2]
    return max(outputs, default=0)
