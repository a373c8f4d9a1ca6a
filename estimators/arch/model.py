"""A model as an architecture describes it: its modules, their weights and its layers."""

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.specs import (
    DenseMLP,
    FeedForward,
    KVBuffer,
    Mixer,
    MixtureOfExperts,
    StateBuffer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.dtypes import Quantization


class Part(str, Enum):
    """What a parameter belongs to; ``attention`` is every token mixer, SSMs included."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared_experts"
    ROUTER = "router"
    NORM = "norm"
    HEAD = "head"
    VISION = "vision"
    OTHER = "other"


# A router that mlx-lm's `quant_predicate` keeps at 8 bits (qwen3_moe.py and others).
ROUTER_8BIT = Quantization(8, 64)


class LowRank(Struct, frozen=True):
    """What an adapter adds to a matrix product (mlx-lm tuner/lora.py and dora.py)."""

    rank: int
    width: int
    """Bytes of one of its elements."""
    rescales: bool
    """Whether it also computes the norms of the adapted matrix, as DoRA does."""


class Module(Struct, frozen=True):
    """One weight of the mlx-lm model class, with its bias."""

    path: str
    shape: tuple[int, ...]
    """As MLX has it."""
    part: Part
    bias: int = 0
    """Elements of its bias."""
    quantizable: bool = False
    """Whether the class has ``to_quantized`` (Linear, Embedding, SwitchLinear)."""
    predicate: Quantization | bool = True
    """The answer of the model class's ``quant_predicate``; True: the defaults."""
    float32: bool = False
    """Whether it stays float32 for any type of the model."""
    loaded: bool = True
    """False for what a checkpoint holds and mlx-lm drops (vision towers)."""
    low_rank: LowRank | None = None

    @property
    def elements(self) -> int:
        """Elements of the weight without its bias."""
        return prod(self.shape)


Modules = tuple[Module, ...]


def linear(
    path: str,
    inputs: int,
    outputs: int,
    part: Part = Part.ATTENTION,
    *,
    bias: bool = False,
    predicate: Quantization | bool = True,
) -> Module:
    """A Linear: weight (outputs, inputs)."""
    return Module(path, (outputs, inputs), part, outputs if bias else 0, True, predicate)


def multi_linear(path: str, heads: int, inputs: int, outputs: int) -> Module:
    """One matrix per head, as latent attention absorbs them: weight (heads, outputs, inputs)."""
    return Module(path, (heads, outputs, inputs), Part.ATTENTION, 0, True)


def switch_linear(
    path: str, experts: int, inputs: int, outputs: int, *, bias: bool = False
) -> Module:
    """The stacked matrices of all experts: weight (experts, outputs, inputs)."""
    return Module(
        path, (experts, outputs, inputs), Part.EXPERTS, experts * outputs if bias else 0, True
    )


def embedding(path: str, vocabulary: int, hidden: int) -> Module:
    """A token embedding: weight (vocabulary, hidden)."""
    return Module(path, (vocabulary, hidden), Part.EMBEDDING, 0, True)


def norm(path: str, size: int, *, bias: bool = False) -> Module:
    """An RMSNorm or LayerNorm: weight (size,)."""
    return Module(path, (size,), Part.NORM, size if bias else 0)


def array(
    path: str, shape: tuple[int, ...], part: Part = Part.ATTENTION, *, float32: bool = False
) -> Module:
    """A parameter that is never quantised: a convolution, a state matrix, a router bias."""
    return Module(path, shape, part, float32=float32)


def convolution(path: str, channels: int, kernel: int, *, bias: bool = False) -> Module:
    """A convolution of each channel by itself: weight (channels, kernel, 1), never quantised."""
    return Module(path, (channels, kernel, 1), Part.ATTENTION, channels if bias else 0)


def under(prefix: str, modules: Iterable[Module]) -> Modules:
    """Return the modules with ``prefix.`` before their paths."""
    return tuple(replace(module, path=f"{prefix}.{module.path}") for module in modules)


def gated_mlp(
    hidden: int, intermediate: int, *, bias: bool = False, part: Part = Part.MLP
) -> Modules:
    """gate, up and down projections of a SwiGLU-like MLP."""
    return (
        linear("gate_proj", hidden, intermediate, part, bias=bias),
        linear("up_proj", hidden, intermediate, part, bias=bias),
        linear("down_proj", intermediate, hidden, part, bias=bias),
    )


def sandwich_norms(hidden: int) -> Modules:
    """Norms before and after both attention and MLP, as Gemma 2 and its successors have them."""
    return (
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
        norm("pre_feedforward_layernorm", hidden),
        norm("post_feedforward_layernorm", hidden),
    )


def switch_glu(hidden: int, intermediate: int, experts: int, *, bias: bool = False) -> Modules:
    """gate, up and down projections of all experts, stacked (mlx-lm SwitchGLU)."""
    return (
        switch_linear("gate_proj", experts, hidden, intermediate, bias=bias),
        switch_linear("up_proj", experts, hidden, intermediate, bias=bias),
        switch_linear("down_proj", experts, intermediate, hidden, bias=bias),
    )


class Layer(Struct, frozen=True):
    """One decoder layer; a layer may have several mixers (Falcon-H1) or none (Nemotron-H MLPs)."""

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    modules: Modules
    """Its parameters; paths are relative to the layer."""
    mixer_paths: tuple[str, ...] = ()
    """The path under which each mixer has its modules, where there are several mixers."""
    streams: int = 1
    """Hidden states carried side by side (Gemma 3n's alternating updates)."""
    norms_after: bool = False
    """Whether its two norms are of what its blocks make, not of what they read (OLMo 2)."""

    @property
    def experts(self) -> MixtureOfExperts | None:
        """Its mixture of experts, None where it has none."""
        match self.feed_forward:
            case MixtureOfExperts():
                return self.feed_forward
            case DenseMLP() | None:
                return None
            case _:
                assert_never(self.feed_forward)


class Model(Struct, frozen=True, kw_only=True, dict=True):
    """An architecture with every size filled in."""

    model_type: str = ""
    """That of the config, which is known where the class's row is looked up."""
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    modules: Modules
    """Parameters outside the layers, with full paths."""
    layers_path: str = "model.layers"
    first_layer: int = 0
    """The number of the first of ``layers``: above 0 in the second part of a pipeline."""
    makes_own_cache: bool = False
    """Whether the mlx-lm class has ``make_cache``; ``max_kv_size`` then has no effect."""
    max_context: int | None = None
    attention_widths: frozenset[tuple[int, int]] = frozenset()
    """Of keys and values that the attention of a traced class is called with in prefill."""
    kv_quantizable: bool = True
    """False where its attention cannot read a quantised cache."""
    dtype: str = "BF16"
    deepstack_layers: int = 0
    """Layers, from the first, that add an input of their own: features of images."""
    notes: tuple[str, ...] = ()
    """Assumptions that the reader of a figure must know."""

    def all_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield every module with its full path, as the mlx-lm class names it."""
        for module in self.modules:
            yield module.path, module
        for index, layer in enumerate(self.layers, self.first_layer):
            prefix = f"{self.layers_path}.{index}."
            for module in layer.modules:
                yield prefix + module.path, module

    @cached_property
    def module_paths(self) -> dict[Module, list[str]]:
        """The full paths of each kind of module: most layers have equal ones."""
        paths: dict[Module, list[str]] = {}
        for path, module in self.all_modules():
            paths.setdefault(module, []).append(path)
        return paths

    @property
    def tied_head(self) -> bool:
        """Whether the head reads the embedding's matrix."""
        return all(module.part is not Part.HEAD for module in self.modules)

    def mixers(self) -> Iterator[Mixer]:
        """Yield the mixers of all layers in order."""
        for layer in self.layers:
            yield from layer.mixers

    def kv_buffers(self) -> Iterator[KVBuffer]:
        """Yield the buffers that layers own, in order."""
        for mixer in self.mixers():
            if mixer.owns_cache:
                yield from mixer.kv_buffers()

    @cached_property
    def kv_buffer_counts(self) -> Counter[KVBuffer]:
        """How many there are of each buffer, in order of appearance: many layers are equal."""
        return Counter(self.kv_buffers())

    def states(self) -> Iterator[StateBuffer]:
        """Yield the recurrent and convolution states of all layers in order."""
        for mixer in self.mixers():
            yield from mixer.states()

    @cached_property
    def state_counts(self) -> Counter[StateBuffer]:
        """How many there are of each state, in order of appearance."""
        return Counter(self.states())

    def experts(self) -> dict[int, MixtureOfExperts]:
        """Return the mixtures of experts by the number of their layer."""
        numbered = enumerate(self.layers, self.first_layer)
        found = ((index, layer.experts) for index, layer in numbered)
        return {index: experts for index, experts in found if experts}

    def layer_kinds(self) -> dict[str, int]:
        """Return how many mixers of each kind there are, in order of appearance."""
        return dict(Counter(mixer.kind for mixer in self.mixers()))
