"""Gemma 3n: alternating updates, low-rank residuals, per-layer embeddings, shared caches.

Source: mlx-lm models/gemma3n.py.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch.blocks import attention, dense_mlp, grouped_attention
from memfit.estimators.arch.families import towers_gemma3n
from memfit.estimators.arch.families.towers import with_towers
from memfit.estimators.arch.families.windows import FULL, SLIDING
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import (
    Layer,
    Model,
    Modules,
    Part,
    array,
    embedding,
    linear,
    norm,
    sandwich_norms,
    under,
)
from memfit.estimators.arch.registry import Irregular, VisionTraits
from memfit.estimators.arch.specs import Attention, DenseMLP

_LANGUAGE_MODEL = "model.language_model"


def _build(fields: Fields) -> Model:
    if not fields.has("text_config"):
        raise fields.fail("text_config", "missing; the model class needs it")
    text = fields.section("text_config")
    hidden, count = text.count("hidden_size"), text.layers()
    text.ignore("query_pre_attn_scalar")
    vocabulary = text.count("vocab_size")
    inputs = text.count("altup_num_inputs", most=64)
    layer_width = text.count("hidden_size_per_layer_input")
    modules = (
        *under("self_attn", attention(hidden, _attention_spec(text))),
        *sandwich_norms(hidden),
        *under("altup", _alternating_updates(hidden, inputs)),
        *under("laurel", _low_rank_residual(hidden, text.count("laurel_rank"))),
        *per_layer_gate(hidden, layer_width),
    )
    outside = (
        embedding("embed_tokens", vocabulary, hidden),
        *per_layer_embeddings(text, hidden, count * layer_width, layer_width),
        *_stream_projections(hidden, inputs),
        norm("norm", hidden),
    )
    model = Model(
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=tuple(_layers(text, hidden, modules)),
        modules=under(_LANGUAGE_MODEL, outside),
        layers_path=f"{_LANGUAGE_MODEL}.layers",
        makes_own_cache=True,
    )
    return with_towers(
        model, fields, {"gemma3n": towers_gemma3n.mobilenet}, {"gemma3n": towers_gemma3n.audio}
    )


def per_layer_embeddings(text: Fields, hidden: int, width: int, layer_width: int) -> Modules:
    """A second embedding of ``width`` that gives every layer its own input; Gemma 4 has it too."""
    vocabulary = text.count("vocab_size_per_layer_input")
    return (
        embedding("embed_tokens_per_layer", vocabulary, width),
        linear("per_layer_model_projection", hidden, width, Part.OTHER),
        norm("per_layer_projection_norm", layer_width),
    )


def per_layer_gate(hidden: int, layer_width: int) -> Modules:
    """What lets a layer take its own input in."""
    return (
        linear("per_layer_input_gate", hidden, layer_width, Part.OTHER),
        linear("per_layer_projection", layer_width, hidden, Part.OTHER),
        norm("post_per_layer_input_norm", hidden),
    )


def layers_with_cache(text: Fields, kinds: list[str], shared: int) -> int:
    """Return how many layers have a cache of their own; the last ``shared`` read another's.

    Every kind of layer must be among the first ones, or there is no cache to read.
    """
    own = max(len(kinds) - shared, 0)
    if orphans := sorted(set(kinds) - set(kinds[:own])):
        raise text.fail(
            "num_kv_shared_layers",
            f"with {shared} of {len(kinds)} layers sharing, no {orphans[0]} layer has a cache",
        )
    return own


def _layers(text: Fields, hidden: int, modules: Modules) -> Iterator[Layer]:
    count = text.layers()
    kinds = text.texts("layer_types", count)
    intermediates = text.counts("intermediate_size", count)
    sparse = text.items("activation_sparsity_pattern", count) or [0] * count
    if kinds is None or intermediates is None:
        key = "layer_types" if kinds is None else "intermediate_size"
        raise text.fail(key, "missing; the model class needs it")
    full = _attention_spec(text)
    mixers = {FULL: full, SLIDING: full.sliding(text.count("sliding_window"))}
    text.require_kinds("layer_types", kinds, tuple(mixers), tuple(mixers))
    own = layers_with_cache(text, kinds, text.count("num_kv_shared_layers", least=0))
    streams = text.count("altup_num_inputs")
    for index, intermediate in enumerate(intermediates):
        mixer = replace(mixers[kinds[index]], owns_cache=index < own)
        _, mlp = dense_mlp(hidden, intermediate)
        # gelu_topk also has squares of the distances to the mean, and distances to the cut-off.
        arrays = 3 if sparse[index] else 1
        feed_forward = DenseMLP(intermediate=intermediate, activation_arrays=arrays)
        yield Layer((mixer,), feed_forward, modules + mlp, streams=streams)


def _attention_spec(text: Fields) -> Attention:
    spec = grouped_attention(text, text.count("head_dim"), qk_norm=True)
    return replace(spec, value_norm=True)


def _alternating_updates(hidden: int, inputs: int) -> Modules:
    return (
        array("correct_output_scale", (hidden,), Part.OTHER),
        linear("correction_coefs", inputs, inputs, Part.OTHER),
        linear("prediction_coefs", inputs, inputs**2, Part.OTHER),
        linear("modality_router", hidden, inputs, Part.OTHER),
        norm("router_norm", hidden),
    )


def _low_rank_residual(hidden: int, rank: int) -> Modules:
    return (
        linear("linear_left", hidden, rank, Part.OTHER),
        linear("linear_right", rank, hidden, Part.OTHER),
        norm("post_laurel_norm", hidden),
    )


def _stream_projections(hidden: int, inputs: int) -> Modules:
    return tuple(
        linear(f"{name}.{index}", hidden, hidden, Part.OTHER)
        for name in ("altup_projections", "altup_unembed_projections")
        for index in range(inputs - 1)
    )


CLASSES = {
    "gemma3n": Irregular(
        builder=_build,
        drops=r"^model\.(vision_tower|audio_tower|embed_audio|embed_vision)\.",
        vision=VisionTraits(float32=True, convolves=True, merges=3),
    )
}
