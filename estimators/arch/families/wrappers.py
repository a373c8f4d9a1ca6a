"""Multimodal configs: a text model's config inside; mlx-lm wraps its class in another.

Source: the mlx-lm module of the model type's name (`llava` is loaded as mistral3, `qwen2_5_vl`
as qwen2_vl and `gemma4_unified` as gemma4: mlx-lm utils.py, MODEL_REMAPPING).
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.caches import Growth
from memfit.estimators.arch.families import llama4
from memfit.estimators.arch.families.vision import with_towers
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import under
from memfit.estimators.arch.registry import FAMILIES, family
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError

_PREFIX = "language_model"


class Wrapper(Struct, frozen=True, kw_only=True):
    """One wrapper class of mlx-lm or mlx-vlm."""

    text_type: str = ""
    """The model type of its text model; none where ``build`` has it."""
    other_texts: tuple[str, ...] = ()
    """Other values of ``text_config.model_type`` that it accepts."""
    build: Callable[[Fields], Model] | None = None
    """Builds a text model that is no model type of its own."""
    section: str = ""
    """Another name of ``text_config``, which counts where that is absent."""
    flat: bool = False
    """Whether the root is the text section when there is no ``text_config``."""
    empty: bool = False
    """Whether the text section is empty when there is no ``text_config``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the class puts into the section where a key is absent."""
    vocabulary: int | None = None
    """The default of the root's ``vocab_size``, which replaces the section's."""
    drops_head: bool = False
    """Whether the text model has a head only where the checkpoint has one."""
    makes_own_cache: bool = False
    """Whether the wrapper passes ``make_cache`` on."""


_GEMMA4 = Wrapper(
    text_type="gemma4_text",
    empty=True,
    defaults={"num_attention_heads": 8, "num_key_value_heads": 1},
    vocabulary=262144,
    makes_own_cache=True,
)
_MISTRAL3 = Wrapper(
    text_type="llama",
    other_texts=("ministral3", "mistral4"),
    defaults={"tie_word_embeddings": False},
)
_QWEN2_VL = Wrapper(text_type="qwen2", flat=True)

WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper(
        text_type="gemma3_text",
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4},
        vocabulary=262208,
        drops_head=True,
        makes_own_cache=True,
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "llama4": Wrapper(text_type="llama4", build=llama4.build_language_model, makes_own_cache=True),
    "llava": _MISTRAL3,
    "mistral3": _MISTRAL3,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen3_vl": Wrapper(text_type="qwen3", flat=True),
    "qwen3_vl_moe": Wrapper(text_type="qwen3_moe"),
}


def build(fields: Fields) -> Model:
    """Return the model of a config with a ``model_type`` of the wrappers."""
    return wrap(fields, WRAPPERS[fields.text("model_type")])


def wrap(fields: Fields, wrapper: Wrapper) -> Model:
    """Return the text model of a config inside its wrapper, with the towers."""
    model_type = fields.text("model_type")
    text = _text_section(fields, wrapper)
    inner = _text_model(text, wrapper)
    _check_head(fields, text, inner)
    layers = inner.layers
    if inner.makes_own_cache and not wrapper.makes_own_cache:
        layers = tuple(_unrotated(layer) for layer in layers)
    model = replace(
        inner,
        model_type=model_type,
        layers=layers,
        modules=under(_PREFIX, inner.modules),
        layers_path=f"{_PREFIX}.{inner.layers_path}",
        makes_own_cache=wrapper.makes_own_cache,
    )
    return with_towers(model, fields)


def _text_section(fields: Fields, wrapper: Wrapper) -> Fields:
    """Return the text model's config as the class leaves it."""
    if fields.has("text_config") or wrapper.empty:
        text = fields.section("text_config")
    elif fields.has(wrapper.section):
        text = fields.section(wrapper.section)
    elif wrapper.flat and not fields.null("text_config"):
        text = fields
    else:
        raise fields.fail("text_config", "missing; the model class needs it")
    forced: dict[str, Any] = {}
    if wrapper.vocabulary is not None:
        default = None if fields.null("vocab_size") else wrapper.vocabulary
        forced["vocab_size"] = fields.count("vocab_size", default)
    if wrapper.drops_head and fields.given("tie_word_embeddings"):
        forced["tie_word_embeddings"] = fields.required_flag("tie_word_embeddings")
    return text.with_overrides(forced, wrapper.defaults)


def _text_model(text: Fields, wrapper: Wrapper) -> Model:
    if wrapper.build:
        return wrapper.build(text)
    declared = text.text("model_type", wrapper.text_type)
    text_type = declared if declared in wrapper.other_texts else wrapper.text_type
    text = text.with_overrides({"model_type": text_type})
    if text_type not in FAMILIES:
        where = text.fail("model_type", f"{text_type!r} is not described")
        raise UnsupportedError(str(where))
    model: Model = family(text_type).build(text)
    return model


def _check_head(fields: Fields, text: Fields, inner: Model) -> None:
    """Reject a config that says whether the head is tied where the class does not read it."""
    if text.given("tie_word_embeddings") or not fields.given("tie_word_embeddings"):
        return
    if fields.required_flag("tie_word_embeddings") != inner.tied_head:
        raise text.fail(
            "tie_word_embeddings",
            "missing; mlx-lm does not look for it at the root and cannot load the head as it is",
        )


def _unrotated(layer: Layer) -> Layer:
    """Without ``make_cache`` every layer gets a cache that keeps all tokens."""
    return replace(layer, mixers=tuple(_keeping_all(mixer) for mixer in layer.mixers))


def _keeping_all(mixer: Mixer) -> Mixer:
    match mixer:
        case Attention():
            return replace(mixer, growth=Growth.STEPS)
        case LatentAttention() | GatedDelta() | Recurrent() | TracedMixer():
            return mixer
        case _:
            assert_never(mixer)
