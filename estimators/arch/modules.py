"""Parameters of a model by module, and short ways to write the common blocks."""

from collections.abc import Iterable
from enum import Enum
from math import prod

from msgspec import Struct
from msgspec.structs import replace

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
