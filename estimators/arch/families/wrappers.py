"""Multimodal configs: a text model's config inside; mlx-lm wraps its class in another.

Source: the mlx-lm module of the model type's name (`llava` is loaded as mistral3, `qwen2_5_vl`
as qwen2_vl and `gemma4_unified` as gemma4: mlx-lm utils.py, MODEL_REMAPPING).
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import field
from msgspec.structs import replace

from memfit.estimators.arch.families import (
    deepseek,
    gemma4,
    llama4,
    towers_gemma,
    towers_llama,
    towers_qwen,
)
from memfit.estimators.arch.families.towers import Towers, with_towers
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model, under
from memfit.estimators.arch.registry import (
    GATE_UP,
    NESTED,
    ROTARY,
    ClassRow,
    VisionTraits,
    class_row,
)
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    Growth,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError

_PREFIX = "language_model"


class Wrapper(ClassRow, frozen=True, kw_only=True):
    """A class around a text model of its own or of another type."""

    text_type: str = ""
    """The model type of its text model; none where ``text`` builds it."""
    other_texts: tuple[str, ...] = ()
    """Other values of ``text_config.model_type`` that it accepts."""
    text: Callable[[Fields], Model] | None = None
    """Builds a text model that has no model type of its own."""
    section: str = ""
    """Another name of ``text_config``, which counts where that is absent."""
    flat: bool = False
    """Whether the root is the text section when there is no ``text_config``."""
    empty: bool = False
    """Whether the text section is empty when there is no ``text_config``."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the class puts into the section where a key is absent."""
    text_forced: Mapping[str, Any] = field(default_factory=dict)
    """What the class puts there whatever the section has."""
    vocabulary: int | None = None
    """The default of the root's ``vocab_size``, which replaces the section's."""
    drops_head: bool = False
    """Whether the text model has a head only where the checkpoint has one."""
    makes_own_cache: bool = False
    """Whether the wrapper passes ``make_cache`` on."""
    vision_towers: Towers = field(default_factory=dict)
    audio_towers: Towers = field(default_factory=dict)

    def describe(self, fields: Fields) -> Model:
        """Return the text model of a config inside its wrapper, with the towers."""
        text = _text_section(fields, self)
        inner = _text_model(text, self)
        _check_head(fields, text, inner)
        layers = inner.layers
        if inner.makes_own_cache and not self.makes_own_cache:
            layers = tuple(_unrotated(layer) for layer in layers)
        model = replace(
            inner,
            layers=layers,
            modules=under(_PREFIX, inner.modules),
            layers_path=f"{_PREFIX}.{inner.layers_path}",
            makes_own_cache=self.makes_own_cache,
        )
        return with_towers(model, fields, self.vision_towers, self.audio_towers)


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
    forced = dict(wrapper.text_forced)
    if wrapper.vocabulary is not None:
        default = None if fields.null("vocab_size") else wrapper.vocabulary
        forced["vocab_size"] = fields.count("vocab_size", default)
    if wrapper.drops_head and fields.given("tie_word_embeddings"):
        forced["tie_word_embeddings"] = fields.required_flag("tie_word_embeddings")
    for key, value in wrapper.text_keys.items():
        if fields.given(key) and not text.given(key) and fields.required_flag(key) != value:
            raise text.fail(key, "missing; no class looks for it at the root")
    return text.with_overrides(forced, {**wrapper.text_keys, **wrapper.text_defaults})


def _text_model(text: Fields, wrapper: Wrapper) -> Model:
    if wrapper.text:
        return wrapper.text(text)
    declared = text.text("model_type", wrapper.text_type)
    text_type = declared if declared in wrapper.other_texts else wrapper.text_type
    row = class_row(text_type)
    if row is None:
        where = text.fail("model_type", f"{text_type!r} is not described")
        raise UnsupportedError(str(where))
    return row.build(text)


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


_GEMMA4 = Wrapper(
    text_type="gemma4_text",
    empty=True,
    text_defaults={"num_attention_heads": 8, "num_key_value_heads": 1},
    vocabulary=262144,
    makes_own_cache=True,
    vision_towers={"gemma4": towers_gemma.gemma4_vision},
    audio_towers={"gemma4": towers_gemma.gemma4_audio},
    drops=r"^(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_audio|embed_vision"
    rf"|vision_embedder)|{gemma4.DROPS}",
    renames=NESTED[:1],
    joined=GATE_UP,
    since=(0, 31, 2),
    vision=VisionTraits(
        norms_heads=True, pads_heads=True, masks_patches=True, one_hot_positions=True, joins="all"
    ),
)
_MISTRAL3 = Wrapper(
    text_type="llama",
    other_texts=("ministral3", "mistral4"),
    text_defaults={"tie_word_embeddings": False},
    vision_towers={"pixtral": towers_llama.mistral3},
    drops=rf"vision_tower|multi_modal_projector|{ROTARY}",
    drops_when_tied=r"^(language_model\.)?lm_head\.weight$",
    renames=NESTED,
    by_text_class=True,
    vision=VisionTraits(masks_patches=True, joins="all"),
)
# mlx-lm 0.32.2, models/qwen3.py and qwen3_moe.py, ModelArgs; mlx-vlm 0.7.10, models/qwen3_vl and
# qwen3_vl_moe, config.py, TextConfig.
_TIED = {"tie_word_embeddings": False}
_QWEN2_VL = Wrapper(
    text_type="qwen2",
    flat=True,
    vision_towers={"qwen2_vl": towers_qwen.qwen2_vl},
    drops=r"^(visual|vision_tower)\.",
    drops_in_layout=("model.language_model.", r"^model\.(?!language_model\.)"),
    renames=NESTED,
    since=(0, 26, 4),
    vision=VisionTraits(),
)
_KIMI_K25 = Wrapper(
    text_type="deepseek_v3",
    # Its own head, never the embedding (kimi_k25.py, LanguageModel).
    text_defaults={"tie_word_embeddings": False},
    drops=r"^(vision_tower|vision_model|multi_modal_projector|mm_projector)(\.|$)"
    r"|^language_model\.model\.layers\.61|rotary_emb\.inv_freq",
    fp8=deepseek.V3.fp8,
    unpacks_integers=True,
    tensor=deepseek.V3.tensor,
    pipeline=True,
    rewritten=deepseek.V3.rewritten,
    since=(0, 30, 6),
)
# What pixtral.py and lfm2-vl.py take out.
_TOWER = r"^(vision_tower|multi_modal_projector)(\.|$)"
CLASSES: dict[str, ClassRow] = {
    "gemma3": Wrapper(
        text_type="gemma3_text",
        text_defaults={"num_attention_heads": 8, "num_key_value_heads": 4},
        vocabulary=262208,
        drops_head=True,
        makes_own_cache=True,
        vision_towers={"siglip_vision_model": towers_gemma.siglip},
        drops=r"^(vision_tower|multi_modal_projector)\.",
        own_head="language_model.lm_head",
        vision=VisionTraits(rotates=False),
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": replace(
        _GEMMA4,
        vision_towers={"gemma4_unified": towers_gemma.gemma4_unified_vision},
        audio_towers={"gemma4_unified": towers_gemma.gemma4_unified_audio},
        since=(0, 32, 0),
        vision=None,
    ),
    "kimi_k25": _KIMI_K25,
    "kimi_vl": Wrapper(
        text_type="deepseek_v3",
        text_forced={"tie_word_embeddings": False},
        drops="vision_tower|rotary_emb|multi_modal_projector",
        keeps_shapes=True,
        rewritten=deepseek.V3.rewritten,
    ),
    "lfm2-vl": Wrapper(
        text_type="lfm2",
        text_forced={"tie_word_embeddings": False},
        makes_own_cache=True,
        drops=_TOWER,
        keeps_shapes=True,
        since=(0, 26, 4),
    ),
    "llama4": Wrapper(
        text_type="llama4",
        text=llama4.build_language_model,
        makes_own_cache=True,
        vision_towers={"llama4_vision_model": towers_llama.llama4},
        drops=r"vision_model|multi_modal_projector",
        joined=GATE_UP,
        vision=VisionTraits(),
    ),
    "llava": replace(
        _MISTRAL3,
        vision_towers={"clip_vision_model": towers_llama.clip, "pixtral": towers_llama.llava},
        since=(0, 28, 2),
        vision=VisionTraits(rotates=False, float32=True, tower="clip_vision_model"),
    ),
    "mistral3": _MISTRAL3,
    "pixtral": Wrapper(
        text_type="llama",
        text_defaults={"num_attention_heads": 32},
        text_forced={"tie_word_embeddings": False},
        drops=_TOWER,
    ),
    "qwen2_5_vl": replace(_QWEN2_VL, vision_towers={"qwen2_5_vl": towers_qwen.qwen2_5_vl}),
    "qwen2_vl": _QWEN2_VL,
    "qwen3_vl": replace(
        _QWEN2_VL,
        text_type="qwen3",
        vision_towers={"qwen3_vl": towers_qwen.qwen3_vl},
        text_keys=_TIED,
        since=(0, 28, 3),
        vision=VisionTraits(pads_heads=True),
    ),
    "qwen3_vl_moe": Wrapper(
        text_type="qwen3_moe",
        vision_towers={"qwen3_vl_moe": towers_qwen.qwen3_vl},
        drops=r"^(?!language_model\.|model\.language_model\.|lm_head\.)",
        renames=NESTED,
        expert_names={},
        joined=GATE_UP,
        text_keys=_TIED,
        since=(0, 28, 3),
        vision=VisionTraits(pads_heads=True),
    ),
}
