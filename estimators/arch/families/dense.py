"""Dense transformers: one description for all, each model type a row of dense_rows.

Source: the mlx-lm module of the model type's name.
"""

from memfit.estimators.arch.caches import Growth
from memfit.estimators.arch.families.dense_models import ROWS
from memfit.estimators.arch.families.dense_traits import Dense, Flag, HeadDim, QKNorm, Width
from memfit.estimators.arch.families.windows import SLIDING
from memfit.estimators.arch.fields import MAX_LAYERS, MAX_VALUE, Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import (
    Module,
    Modules,
    Part,
    array,
    embedding,
    linear,
    norm,
    under,
)
from memfit.estimators.arch.specs import Attention, DenseMLP
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.records import record

# A norm for each head is a module for each head; no published model comes near this many.
MAX_NORMED_HEADS = 256

_WINDOW_KEYS = (
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
)


@record(frozen=True, slots=True)
class _Sizes:
    """The sizes that shape a layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int


def build(fields: Fields) -> Model:
    """Return the model of a config whose ``model_type`` is one of the rows."""
    model_type = fields.text("model_type")
    return describe(fields, ROWS[model_type], model_type)


def describe(fields: Fields, row: Dense, model_type: str) -> Model:
    """Return the model of a config, or of a section of one, read as ``row`` says."""
    sizes = _sizes(fields, row)
    count = _size(fields, row, row.layers_key, most=MAX_LAYERS)
    vocabulary = _size(fields, row, "vocab_size")
    windows = row.windows(fields, count) if row.windows else (None,) * count
    notes = _notes(fields, windows)
    fields.ignore(*row.ignored, *_WINDOW_KEYS)
    modules = _layer_modules(fields, row, sizes)
    mlp = DenseMLP(intermediate=sizes.width, gated=row.gated)
    mixers = {window: _mixer(fields, row, sizes, window) for window in set(windows)}
    return Model(
        model_type=model_type,
        hidden_size=sizes.hidden,
        vocab_size=vocabulary,
        layers=tuple(Layer((mixers[window],), mlp, modules) for window in windows),
        modules=_outside(fields, row, sizes.hidden, vocabulary),
        layers_path=row.layers_path,
        makes_own_cache=row.makes_own_cache,
        kv_quantizable=row.kv_quantizable,
        notes=notes,
    )


def _sizes(fields: Fields, row: Dense) -> _Sizes:
    hidden = _size(fields, row, row.hidden_key)
    most = MAX_NORMED_HEADS if row.qk_norm is QKNorm.EACH_HEAD else MAX_VALUE
    heads = _size(fields, row, row.heads_key, most=most)
    head_dim = _head_dim(fields, row, hidden, heads)
    if row.heads_match_hidden and heads * head_dim != hidden:
        raise fields.fail(
            row.heads_key,
            f"{heads} heads of {head_dim} are not {row.hidden_key} {hidden};"
            " the model class needs them to be",
        )
    kv_heads = _kv_heads(fields, row, heads)
    return _Sizes(hidden, heads, kv_heads, head_dim, _width(fields, row, hidden))


def _size(fields: Fields, row: Dense, key: str, *, most: int = MAX_VALUE) -> int:
    # A null takes the place of the class's default, which then cannot be built.
    default = None if fields.null(key) else row.defaults.get(key)
    return fields.count(key, default, most=most)


def _head_dim(fields: Fields, row: Dense, hidden: int, heads: int) -> int:
    if row.head_dim is HeadDim.GIVEN:
        return _size(fields, row, row.head_dim_key)
    if row.head_dim is HeadDim.OPTIONAL and fields.has(row.head_dim_key):
        return fields.count(row.head_dim_key)
    derived = hidden // heads
    if not derived:
        raise fields.fail(row.heads_key, f"{heads} heads in a {row.hidden_key} of {hidden}")
    fields.expect(row.head_dim_key, derived)
    return derived


def _kv_heads(fields: Fields, row: Dense, heads: int) -> int:
    key = row.kv_heads_key
    if key is None:
        return heads
    default = heads if row.kv_optional else None
    if not fields.null(key):
        default = row.defaults.get(key, default)
    kv_heads = fields.count(key, default)
    fields.require_multiple(row.heads_key, heads, key, kv_heads)
    return kv_heads


def _width(fields: Fields, row: Dense, hidden: int) -> int:
    if row.width is Width.FOUR_HIDDEN:
        fields.expect(row.width_key, 4 * hidden)
        return 4 * hidden
    width = _size(fields, row, row.width_key)
    return width // 2 if row.width is Width.HALF else width


def _mixer(fields: Fields, row: Dense, sizes: _Sizes, window: int | None) -> Attention:
    return Attention(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        key_dim=sizes.head_dim,
        value_dim=sizes.head_dim,
        window=window,
        growth=Growth.ROTATING if window and row.rotating else Growth.STEPS,
        qk_norm=_has_qk_norm(fields, row),
        fused=row.fused,
        float32=row.float32,
    )


def _layer_modules(fields: Fields, row: Dense, sizes: _Sizes) -> Modules:
    bias = _on(fields, row.norm_bias)
    norms = row.norms[:1] if _on(fields, row.parallel) else row.norms
    return (
        *under(row.attention, _attention(fields, row, sizes) + _qk_norms(fields, row, sizes)),
        *under(row.mlp, _mlp(fields, row, sizes)),
        *(norm(name, sizes.hidden, bias=bias) for name in norms),
    )


def _attention(fields: Fields, row: Dense, sizes: _Sizes) -> Modules:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    fused = len(row.projections) == 2
    outputs = [queries + 2 * keys] if fused else [queries, keys, keys]
    bias, output_bias = _on(fields, row.input_bias), _on(fields, row.output_bias)
    inputs = (
        linear(name, sizes.hidden, width, bias=bias)
        for name, width in zip(row.projections[:-1], outputs, strict=True)
    )
    predicate = _residual_predicate(row)
    return (
        *inputs,
        linear(row.projections[-1], queries, sizes.hidden, bias=output_bias, predicate=predicate),
    )


def _has_qk_norm(fields: Fields, row: Dense) -> bool:
    return row.qk_norm is not QKNorm.NONE and _on(fields, row.qk_norm_on)


def _qk_norms(fields: Fields, row: Dense, sizes: _Sizes) -> Modules:
    if not _has_qk_norm(fields, row):
        return ()
    dim = sizes.head_dim
    modules: list[Module] = []
    for path, heads in zip(row.qk_norms, (sizes.heads, sizes.kv_heads), strict=True):
        if row.qk_norm is QKNorm.HEAD:
            modules.append(norm(path, dim))
        elif row.qk_norm is QKNorm.ALL_HEADS:
            modules.append(norm(path, heads * dim))
        elif row.qk_norm is QKNorm.TABLE:
            modules.append(array(path, (heads, dim), Part.NORM))
        else:
            modules.extend(norm(f"{path}.norms.{i}", dim) for i in range(heads))
    return tuple(modules)


def _mlp(fields: Fields, row: Dense, sizes: _Sizes) -> Modules:
    *names, last = row.mlp_projections
    bias = _on(fields, row.mlp_bias)
    fused = row.gated and len(names) == 1
    width = 2 * sizes.width if fused else sizes.width
    predicate = _residual_predicate(row)
    return (
        *(linear(name, sizes.hidden, width, Part.MLP, bias=bias) for name in names),
        linear(last, sizes.width, sizes.hidden, Part.MLP, bias=bias, predicate=predicate),
        *(array(name, (), Part.MLP) for name in row.mlp_scalars),
    )


def _outside(fields: Fields, row: Dense, hidden: int, vocabulary: int) -> Modules:
    modules = [embedding(row.embedding, vocabulary, hidden)]
    if row.positions:
        path, key = row.positions
        modules.append(embedding(path, fields.count(key), hidden))
    modules.append(norm(row.final_norm, hidden, bias=_on(fields, row.norm_bias)))
    if not _on(fields, row.tied):
        bias, predicate = _on(fields, row.head_bias), _residual_predicate(row)
        modules.append(
            linear(row.head, hidden, vocabulary, Part.HEAD, bias=bias, predicate=predicate)
        )
    return tuple(modules)


def _residual_predicate(row: Dense) -> Quantization | bool:
    return Quantization(8, 64) if row.outputs_8bit else True


def _on(fields: Fields, flag: Flag) -> bool:
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
