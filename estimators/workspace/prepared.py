"""What the formula needs of a model on a device and no workload changes."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.caches import KVBuffer
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Module, Part
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base import dtypes
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.recurrent_state import state_bytes
from memfit.estimators.mlx.scheduler import BatchLimits
from memfit.estimators.mlx.split_products import split_products
from memfit.estimators.mlx.vector_attention import vector_attention
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.weights.derived import QuantizationPlan, formats
from memfit.estimators.workspace.call import BackendTraits
from memfit.estimators.workspace.layer_plan import (
    LayerPlan,
    MixerPlan,
    plan_layer,
    touched_elements,
)
from memfit.estimators.workspace.schedule import formula_limits


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
