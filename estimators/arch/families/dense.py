"""Dense transformers: one description for all, by the traits in which their classes differ.

Source: the mlx-lm module of the model type's name. The defaults are what most of them share.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.blocks import FeedForwardBlock, at_8_bits
from memfit.estimators.arch.families.windows import SLIDING
from memfit.estimators.arch.fields import MAX_LAYERS, Fields
from memfit.estimators.arch.model import (
    Layer,
    Model,
    Module,
    Modules,
    Part,
    array,
    embedding,
    linear,
    norm,
    under,
)
from memfit.estimators.arch.registry import ClassRow
from memfit.estimators.arch.specs import Attention, DenseMLP, Growth
from memfit.estimators.base.reading.section import MAX_VALUE

# A norm for each head is a module for each head; no published model comes near this many.
MAX_NORMED_HEADS = 256

_WINDOW_KEYS = (
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
)


# The window in tokens of each layer, None for full attention.
Windows = Callable[[Fields, int], tuple[int | None, ...]]


class Key(Struct, frozen=True):
    """A flag that the config gives; without a default the key must be there."""

    name: str
    default: bool | None = None
    inverted: bool = False


Flag = bool | Key
TIED, UNTIED = Key("tie_word_embeddings", True), Key("tie_word_embeddings", False)
ATTENTION_BIAS, MLP_BIAS = Key("attention_bias", False), Key("mlp_bias", False)


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


class Dense(ClassRow, frozen=True, kw_only=True):
    """A class with dense layers that are all alike; every path and key as the class has it."""

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
    eight_bit: tuple[str, ...] = ()
    """Path endings of what the class's ``quant_predicate`` keeps at 8 bits."""

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

    def describe(self, fields: Fields) -> Model:
        """Return the model of a config, or of a section of one."""
        sizes = sizes_of(fields, self)
        count = fields.count(self.layers_key, most=MAX_LAYERS)
        windows = self.windows(fields, count) if self.windows else (None,) * count
        notes = _notes(fields, windows)
        fields.ignore(*self.ignored, *_WINDOW_KEYS)
        mlp = dense_mlp(fields, self, sizes)
        return replace(decoder_of(fields, self, sizes, windows, [mlp] * count), notes=notes)


class LayerSizes(Struct, frozen=True):
    """The sizes that shape a layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int


def decoder_of(
    fields: Fields,
    traits: Dense,
    sizes: LayerSizes,
    windows: Sequence[int | None],
    feed_forwards: Sequence[FeedForwardBlock],
) -> Model:
    """Return the model of layers with one of the windows and feed-forward blocks each."""
    mixers = {window: _mixer(fields, traits, sizes, window) for window in set(windows)}
    attention = (*_attention(fields, traits, sizes), *_qk_norms(fields, traits, sizes))
    names = traits.norms[:1] if is_on(fields, traits.parallel) else traits.norms
    bias = is_on(fields, traits.norm_bias)
    norms = tuple(norm(name, sizes.hidden, bias=bias) for name in names)
    # Most layers have the same block, and then one tuple of modules.
    modules = {
        id(block): at_8_bits(
            (*under(traits.attention, attention), *block[1], *norms), traits.eight_bit
        )
        for block in feed_forwards
    }
    vocabulary = fields.count("vocab_size")
    outside = _outside(fields, traits, sizes.hidden, vocabulary)
    return Model(
        hidden_size=sizes.hidden,
        vocab_size=vocabulary,
        layers=tuple(
            Layer((mixers[window],), block[0], modules[id(block)], norms_after=traits.norms_after)
            for window, block in zip(windows, feed_forwards, strict=True)
        ),
        modules=at_8_bits(outside, traits.eight_bit),
        layers_path=traits.layers_path,
        makes_own_cache=traits.makes_own_cache,
        kv_quantizable=traits.kv_quantizable,
    )


def sizes_of(fields: Fields, traits: Dense) -> LayerSizes:
    """Return the sizes that shape a layer of a class."""
    hidden = fields.count(traits.hidden_key)
    most = MAX_NORMED_HEADS if traits.qk_norm is QKNorm.EACH_HEAD else MAX_VALUE
    heads = fields.count(traits.heads_key, most=most)
    head_dim = _head_dim(fields, traits, hidden, heads)
    if traits.heads_match_hidden and heads * head_dim != hidden:
        raise fields.fail(
            traits.heads_key,
            f"{heads} heads of {head_dim} are not {traits.hidden_key} {hidden};"
            " the model class needs them to be",
        )
    kv_heads = _kv_heads(fields, traits, heads)
    return LayerSizes(hidden, heads, kv_heads, head_dim, _width(fields, traits, hidden))


def _head_dim(fields: Fields, traits: Dense, hidden: int, heads: int) -> int:
    if traits.head_dim is HeadDim.GIVEN:
        return fields.count(traits.head_dim_key)
    if traits.head_dim is HeadDim.OPTIONAL and fields.has(traits.head_dim_key):
        return fields.count(traits.head_dim_key)
    derived = hidden // heads
    if not derived:
        raise fields.fail(traits.heads_key, f"{heads} heads in a {traits.hidden_key} of {hidden}")
    fields.expect(traits.head_dim_key, derived)
    return derived


def _kv_heads(fields: Fields, traits: Dense, heads: int) -> int:
    key = traits.kv_heads_key
    if key is None:
        return heads
    kv_heads = fields.count(key, heads if traits.kv_optional else None)
    fields.require_multiple(traits.heads_key, heads, key, kv_heads)
    return kv_heads


def _width(fields: Fields, traits: Dense, hidden: int) -> int:
    if traits.width is Width.FOUR_HIDDEN:
        fields.expect(traits.width_key, 4 * hidden)
        return 4 * hidden
    width = fields.count(traits.width_key)
    return width // 2 if traits.width is Width.HALF else width


def _mixer(fields: Fields, traits: Dense, sizes: LayerSizes, window: int | None) -> Attention:
    return Attention(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        key_dim=sizes.head_dim,
        value_dim=sizes.head_dim,
        window=window,
        growth=Growth.ROTATING if window and traits.rotating else Growth.STEPS,
        qk_norm=_has_qk_norm(fields, traits),
        fused=traits.fused,
        float32=traits.float32,
    )


def _attention(fields: Fields, traits: Dense, sizes: LayerSizes) -> Modules:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    fused = len(traits.projections) == 2
    outputs = [queries + 2 * keys] if fused else [queries, keys, keys]
    bias, output_bias = is_on(fields, traits.input_bias), is_on(fields, traits.output_bias)
    inputs = (
        linear(name, sizes.hidden, width, bias=bias)
        for name, width in zip(traits.projections[:-1], outputs, strict=True)
    )
    return (*inputs, linear(traits.projections[-1], queries, sizes.hidden, bias=output_bias))


def _has_qk_norm(fields: Fields, traits: Dense) -> bool:
    return traits.qk_norm is not QKNorm.NONE and is_on(fields, traits.qk_norm_on)


def _qk_norms(fields: Fields, traits: Dense, sizes: LayerSizes) -> Modules:
    if not _has_qk_norm(fields, traits):
        return ()
    dim = sizes.head_dim
    modules: list[Module] = []
    for path, heads in zip(traits.qk_norms, (sizes.heads, sizes.kv_heads), strict=True):
        if traits.qk_norm is QKNorm.HEAD:
            modules.append(norm(path, dim))
        elif traits.qk_norm is QKNorm.ALL_HEADS:
            modules.append(norm(path, heads * dim))
        elif traits.qk_norm is QKNorm.TABLE:
            modules.append(array(path, (heads, dim), Part.NORM))
        else:
            modules.extend(norm(f"{path}.norms.{i}", dim) for i in range(heads))
    return tuple(modules)


def dense_mlp(fields: Fields, traits: Dense, sizes: LayerSizes) -> FeedForwardBlock:
    """Return the MLP of the dense layers of a class."""
    *names, last = traits.mlp_projections
    bias = is_on(fields, traits.mlp_bias)
    fused = traits.gated and len(names) == 1
    width = 2 * sizes.width if fused else sizes.width
    spec = DenseMLP(
        intermediate=sizes.width, gated=traits.gated, activation_arrays=traits.activation_arrays
    )
    modules = (
        *(linear(name, sizes.hidden, width, Part.MLP, bias=bias) for name in names),
        linear(last, sizes.width, sizes.hidden, Part.MLP, bias=bias),
        *(array(name, (), Part.MLP) for name in traits.mlp_scalars),
    )
    return spec, under(traits.mlp, modules)


def _outside(fields: Fields, traits: Dense, hidden: int, vocabulary: int) -> Modules:
    modules = [embedding(traits.embedding, vocabulary, hidden)]
    if traits.positions:
        path, key = traits.positions
        modules.append(embedding(path, fields.count(key), hidden))
    modules.append(norm(traits.final_norm, hidden, bias=is_on(fields, traits.norm_bias)))
    if not is_on(fields, traits.tied):
        bias = is_on(fields, traits.head_bias)
        modules.append(linear(traits.head, hidden, vocabulary, Part.HEAD, bias=bias))
    return tuple(modules)


def is_on(fields: Fields, flag: Flag) -> bool:
    """Return whether a config turns something on."""
    if isinstance(flag, bool):
        return flag
    if fields.null(flag.name):
        fields.ignore(flag.name)
        return flag.inverted
    return fields.flag(flag.name, flag.default) is not flag.inverted


def _notes(fields: Fields, windows: tuple[int | None, ...]) -> tuple[str, ...]:
    if any(windows) or not fields.has("sliding_window"):
        return ()
    if fields.has("use_sliding_window") and not fields.flag("use_sliding_window"):
        return ()
    if SLIDING not in (fields.texts("layer_types") or [SLIDING]):
        return ()
    return ("mlx-lm ignores the sliding window of this model: every layer keeps every token",)
