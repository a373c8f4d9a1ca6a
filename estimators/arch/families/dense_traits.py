"""The traits in which dense transformers differ; the defaults are what most of them share."""

from collections.abc import Callable, Mapping
from enum import Enum, auto

from msgspec import Struct, field

from memfit.estimators.arch.fields import Fields

# The window in tokens of each layer, None for full attention.
Windows = Callable[[Fields, int], tuple[int | None, ...]]


class Key(Struct, frozen=True):
    """A flag that the config gives; without a default the key must be there."""

    name: str
    default: bool | None = None
    inverted: bool = False


Flag = bool | Key


class HeadDim(Enum):
    """Where the width of a head comes from."""

    GIVEN = auto()
    OPTIONAL = auto()  # given, else hidden_size / heads
    DERIVED = auto()  # always hidden_size / heads: a key that says otherwise cannot be loaded


class Width(Enum):
    """Where the width of the MLP comes from."""

    GIVEN = auto()
    HALF = auto()  # the key counts both input projections
    FOUR_HIDDEN = auto()  # always 4 * hidden_size: a key that says otherwise cannot be loaded


class QKNorm(Enum):
    """How queries and keys are normed before attention."""

    NONE = auto()
    HEAD = auto()  # one norm of head_dim for all heads
    ALL_HEADS = auto()  # one norm over all heads side by side
    TABLE = auto()  # one matrix (heads, head_dim)
    EACH_HEAD = auto()  # a list of norms, one per head


class Dense(Struct, frozen=True, kw_only=True):
    """One model class of mlx-lm; every path and every key as that class has it."""

    hidden_key: str = "hidden_size"
    layers_key: str = "num_hidden_layers"
    heads_key: str = "num_attention_heads"
    kv_heads_key: str | None = "num_key_value_heads"
    kv_optional: bool = False
    """Whether absent KV heads are as many as heads."""
    head_dim_key: str = "head_dim"
    head_dim: HeadDim = HeadDim.DERIVED
    heads_match_hidden: bool = False
    """Whether the class runs only where the heads together are as wide as the model."""
    width_key: str = "intermediate_size"
    width: Width = Width.GIVEN
    defaults: Mapping[str, int] = field(default_factory=dict)
    """The class's own values for absent keys."""
    ignored: tuple[str, ...] = ()
    """Keys that change no byte."""

    attention: str = "self_attn"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """q, k, v, o; or fused qkv, o."""
    input_bias: Flag = False
    output_bias: Flag = False
    qk_norm: QKNorm = QKNorm.NONE
    qk_norm_on: Flag = True
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    mlp: str = "mlp"
    mlp_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """gate, up, down; or fused gate_up, down; or, where not ``gated``, up, down."""
    mlp_scalars: tuple[str, ...] = ()
    mlp_bias: Flag = False
    gated: bool = True
    activation_arrays: int = 0
    """As `DenseMLP.activation_arrays`."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norms_after: bool = False
    """As `Layer.norms_after`."""
    norm_bias: Flag = False
    parallel: Flag = False
    """Whether a layer has only the first of its ``norms``."""
    outputs_8bit: bool = False
    """Whether the class's ``quant_predicate`` keeps at 8 bits what writes to the residual stream,
    and the head."""

    layers_path: str = "model.layers"
    embedding: str = "model.embed_tokens"
    positions: tuple[str, str] | None = None
    """The path and the key of learned positions."""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    head_bias: Flag = False
    tied: Flag

    windows: Windows | None = None
    rotating: bool = True
    """False where the class masks the window but keeps every token."""
    fused: bool = True
    """As `Attention.fused`."""
    float32: bool = False
    """As `Attention.float32`."""
    makes_own_cache: bool = False
    kv_quantizable: bool = True
