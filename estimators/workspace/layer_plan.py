"""A layer's matrices as operations need them: how wide, and how many elements MLX touches."""

from collections.abc import Sequence

from msgspec import Struct

from memfit.estimators.arch.model import Layer
from memfit.estimators.arch.modules import LowRank, Module, Part
from memfit.estimators.arch.specs import FeedForward, Mixer
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.mlx.operation_counts import MATMUL, QUANTIZED_MATMUL, OperationCount
from memfit.estimators.weights.derived import QuantizationPlan

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
    matrices: dict[Part, list[tuple[Module, Projection]]] = {}
    for module in layer.modules:
        if module.loaded and len(module.shape) > 1 and module.quantizable:
            projection = _projection(prefix, module, packing)
            matrices.setdefault(module.part, []).append((module, projection))
    # Norms inside a mixer, such as q_norm, have a dotted path and are not counted.
    hidden_norms = sum(m.part is Part.NORM and m.path.count(".") == 0 for m in layer.modules)
    mlp = [p for _, p in matrices.get(Part.MLP, [])]
    # A single output is the gate of a shared expert (mlx-lm qwen2_moe.py, shared_expert_gate).
    shared = [p for _, p in matrices.get(Part.SHARED_EXPERTS, []) if p.outputs > 1]
    is_latent = bool(layer.experts and layer.experts.latent_dim)
    router = matrices.get(Part.ROUTER, [])
    others = [p for _, p in matrices.get(Part.OTHER, [])]
    return LayerPlan(
        mixers=_mixers(layer, matrices.get(Part.ATTENTION, [])),
        feed_forward=layer.feed_forward,
        dense=tuple(shared if is_latent else mlp or shared),
        experts=tuple(p for _, p in matrices.get(Part.EXPERTS, [])),
        latent=tuple(mlp if is_latent else ()),
        router=router[0][1] if router else None,
        norms=hidden_norms,
        norms_after=layer.norms_after,
        streams=layer.streams,
        own_input=tuple(p for p in others if p.name.startswith("per_layer_")),
        own_width=own_width,
        residual=tuple(p for p in others if p.name.startswith("linear_")),
    )


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
