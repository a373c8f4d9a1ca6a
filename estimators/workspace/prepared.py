"""What the formula needs of a model on a device and no workload changes.

That is for each layer its matrices as operations need them: how wide, and how many elements MLX
touches.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.model import Layer, LowRank, Model, Module, Part
from memfit.estimators.arch.specs import (
    Attention,
    FeedForward,
    GatedDelta,
    KVBuffer,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base import dtypes
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kernels import has_nax, split_products, vector_attention
from memfit.estimators.mlx.kv_cache import state_bytes
from memfit.estimators.mlx.operation_counts import MATMUL, QUANTIZED_MATMUL, OperationCount
from memfit.estimators.mlx.scheduler import BatchLimits
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.weights.derived import QuantizationPlan, formats
from memfit.estimators.workspace.call import BackendTraits
from memfit.estimators.workspace.tape import formula_limits

_UINT32_BITS = 32


class Projection(Struct, frozen=True):
    """A matrix product: the last name of its path, its widths and touched elements."""

    name: str
    """The last word of its path."""
    inputs: int
    """Width of a row that goes in."""
    outputs: int
    """Width of a row that comes out; of one expert, where experts are stacked."""
    touched: int
    """Elements of the matrix's arrays: packed words, scales and biases count as they are."""
    counts: OperationCount
    """Kernels and views of the product."""
    packing: Quantization | None
    """How the matrix is packed, None where it is not."""
    low_rank: LowRank | None
    has_bias: bool = False


class MixerPlan(Struct, frozen=True):
    """One token mixer with its projections, the one back to the hidden size last."""

    mixer: Mixer
    projections: tuple[Projection, ...]

    @property
    def inputs(self) -> tuple[Projection, ...]:
        """The projections before the mixing."""
        return self.projections[:-1]

    @property
    def output(self) -> Projection:
        """The projection back to the hidden size."""
        return self.projections[-1]


class LayerPlan(Struct, frozen=True):
    """Everything about a layer that does not depend on tokens."""

    mixers: tuple[MixerPlan, ...]
    feed_forward: FeedForward | None
    dense: tuple[Projection, ...]  # the MLP's or the shared experts'
    experts: tuple[Projection, ...]
    latent: tuple[Projection, ...]
    """To the width of the experts' inputs and back, where that is not the model's."""
    router: Projection | None
    norms: int
    """Norms of the hidden state, outside of the mixers."""
    norms_after: bool
    """As `Layer.norms_after`."""
    streams: int  # hidden states carried side by side (Gemma 3n's alternating updates)
    own_input: tuple[Projection, ...]
    """What takes in the layer's own input: to its width and back (mlx-lm gemma4_text.py)."""
    own_width: int
    """Width of the inputs of all layers, of which each takes a slice."""
    residual: tuple[Projection, ...]
    """What adds a second residual: to a low rank and back (mlx-lm gemma3n.py, laurel)."""


def plan_layer(
    layer: Layer, prefix: str, packing: QuantizationPlan | None, *, own_width: int = 0
) -> LayerPlan:
    """Return the plan of a layer with its modules under ``prefix``."""
    matrices = _matrices(layer, prefix, packing)

    def of(part: Part) -> tuple[Projection, ...]:
        return tuple(projection for _, projection in matrices[part])

    # Norms inside a mixer, such as q_norm, have a dotted path and are not counted.
    hidden_norms = sum(m.part is Part.NORM and m.path.count(".") == 0 for m in layer.modules)
    # A single output is the gate of a shared expert (mlx-lm qwen2_moe.py, shared_expert_gate).
    shared = tuple(p for p in of(Part.SHARED_EXPERTS) if p.outputs > 1)
    is_latent = bool(layer.experts and layer.experts.latent_dim)
    return LayerPlan(
        mixers=_mixers(layer, matrices[Part.ATTENTION]),
        feed_forward=layer.feed_forward,
        dense=shared if is_latent else of(Part.MLP) or shared,
        experts=of(Part.EXPERTS),
        latent=of(Part.MLP) if is_latent else (),
        router=next(iter(of(Part.ROUTER)), None),
        norms=hidden_norms,
        norms_after=layer.norms_after,
        streams=layer.streams,
        own_input=tuple(p for p in of(Part.OTHER) if p.name.startswith("per_layer_")),
        own_width=own_width,
        residual=tuple(p for p in of(Part.OTHER) if p.name.startswith("linear_")),
    )


def _matrices(
    layer: Layer, prefix: str, packing: QuantizationPlan | None
) -> defaultdict[Part, list[tuple[Module, Projection]]]:
    """Return the matrices that a layer multiplies with, by the part that they belong to."""
    matrices: defaultdict[Part, list[tuple[Module, Projection]]] = defaultdict(list)
    for module in layer.modules:
        if module.loaded and len(module.shape) > 1 and module.quantizable:
            matrices[module.part].append((module, _projection(prefix, module, packing)))
    return matrices


def touched_elements(module: Module, quantization: Quantization | None) -> int:
    """Return the elements of the arrays a matrix is held in: packed words, scales and biases."""
    if quantization is None:
        return module.elements
    # A packed word is a uint32 of several weights, and MLX counts words, not weights.
    groups = module.elements // quantization.group_size
    # Affine groups have a scale and a bias; the floating-point modes only a scale.
    tables = 2 if quantization.mode == "affine" else 1
    return module.elements * quantization.bits // _UINT32_BITS + groups * tables


def _projection(prefix: str, module: Module, packing: QuantizationPlan | None) -> Projection:
    format_ = packing.quantization(prefix + module.path, module) if packing else None
    name = module.path.rpartition(".")[2]
    # Experts are stacked: (experts, outputs, inputs).
    outputs = module.shape[0] if len(module.shape) == 2 else module.shape[1]
    counts = QUANTIZED_MATMUL if format_ else MATMUL
    return Projection(
        name=name,
        inputs=module.shape[-1],
        outputs=outputs,
        touched=touched_elements(module, format_),
        counts=counts,
        packing=format_,
        low_rank=module.low_rank,
        has_bias=module.bias > 0,
    )


def _mixers(layer: Layer, matrices: Sequence[tuple[Module, Projection]]) -> tuple[MixerPlan, ...]:
    paths = layer.mixer_paths or ("",) * len(layer.mixers)
    # Two mixers of one layer have paths of their own (Falcon-H1).
    return tuple(
        MixerPlan(mixer, tuple(p for m, p in matrices if m.path.startswith(path)))
        for mixer, path in zip(layer.mixers, paths, strict=True)
    )


class PreparedModel(Struct, frozen=True):
    """A model on one device; the peak of a workload is then cheap."""

    model: Model
    traits: BackendTraits
    """What decides which kernels the device has."""
    limits: BatchLimits | None
    """What closes a batch of its work, None on the CPU."""
    plans: tuple[LayerPlan, ...]
    """The distinct plans of its layers."""
    order: tuple[int, ...]
    """Which plan each layer has."""
    caching: int
    """Layers up to the last that makes a cache or a state: those that a chunk is evaluated to."""
    layers: Counter[int]
    """How many layers have each plan."""
    buffers: tuple[tuple[tuple[KVBuffer, ...], ...], ...]
    """The buffers of each plan, by its mixers."""
    state_bytes: int
    """Bytes of all states of one sequence."""
    head_touched: int
    """Elements that the output projection reads."""
    input_elements: int
    """Of a token: the hidden state, and the inputs of all layers where they have their own."""
    largest_weight: int
    """Bytes of the largest single weight."""
    followed: dict[Hashable, Any] = field(default_factory=dict)
    """What calls hold at once, by their shapes: many workloads have the same calls."""
    recorded: dict[Hashable, Any] = field(default_factory=dict)
    """The programs of layers by call: many calls differ in buffers that a layer does not have."""

    def on(self, traits: BackendTraits, limits: BatchLimits | None) -> "PreparedModel":
        """Return the model on another device, with its own calls."""
        return replace(self, traits=traits, limits=limits, followed={}, recorded={})


def prepare(
    model: Model,
    device: Device,
    *,
    versions: MlxVersions,
    packing: QuantizationPlan | None = None,
) -> PreparedModel:
    """Return a model for a device; ``packing`` says how each module is packed."""
    plans: dict[tuple[Layer, tuple[Quantization | None, ...]], LayerPlan] = {}
    numbers: dict[LayerPlan, int] = {}
    order, caching = [], 0
    own_width = sum(m.shape[1] for m in model.modules if m.path.endswith("embed_tokens_per_layer"))
    for index, layer in enumerate(model.layers, model.first_layer):
        prefix = f"{model.layers_path}.{index}."
        own = packing.layer_formats(prefix, layer) if packing else ()
        plan = plans.get((layer, own))
        if plan is None:
            plan = plans[layer, own] = plan_layer(layer, prefix, packing, own_width=own_width)
        # Equal layers share a plan, so each kind of layer is recorded once in a call.
        order.append(numbers.setdefault(plan, len(numbers)))
        if any(map(_makes_cache, plan.mixers)):
            caching = len(order)
    return PreparedModel(
        model,
        backend_traits(device, versions),
        formula_limits(device),
        tuple(numbers),
        tuple(order),
        caching or len(order),
        Counter(order),
        tuple(tuple(m.mixer.kv_buffers() for m in plan.mixers) for plan in numbers),
        state_bytes(model, 1),
        _head_touched(model, packing),
        model.hidden_size + own_width,
        _largest_weight(model, packing),
    )


def _makes_cache(plan: MixerPlan) -> bool:
    match plan.mixer:
        case Attention() as mixer:
            # Queries alone: it caches the keys and values of an earlier layer (mlx-lm hunyuan.py).
            asks = len(plan.inputs) == 1 and plan.inputs[0].outputs <= mixer.heads * mixer.key_dim
            return mixer.owns_cache and not asks
        case LatentAttention() | GatedDelta() | Recurrent() | TracedMixer() as mixer:
            return mixer.owns_cache
        case _:
            assert_never(plan.mixer)


def backend_traits(device: Device, versions: MlxVersions) -> BackendTraits:
    """Return what decides which kernels a device has."""
    return BackendTraits(
        device.backend,
        versions,
        has_nax(device),
        split_products(device, versions),
        vector_attention(device, versions),
    )


def _head_touched(model: Model, packing: QuantizationPlan | None) -> int:
    # Tied weights: the embedding is the output matrix (mlx nn/layers/embedding.py, as_linear).
    heads = [m for m in model.modules if m.part is Part.HEAD] or [
        m for m in model.modules if m.part is Part.EMBEDDING
    ]
    if not heads:
        return 0
    module: Module = heads[0]
    return touched_elements(module, packing.quantization(module.path, module) if packing else None)


def _largest_weight(model: Model, packing: QuantizationPlan | None) -> int:
    width = dtypes.nbytes(1, model.dtype)
    sizes = [0]
    for module, format_, _ in formats(model, packing):
        if module.loaded and format_:
            # Packed words, scales and biases are separate arrays, and so separate allocations.
            sizes.append(max(format_.tensors(module.elements, width)))
        elif module.loaded:
            sizes.append(module.elements * width)
    return max(sizes)
