"""Multimodal configs that mlx-vlm has a class for and mlx-lm has none.

Source: mlx_vlm/models of the model type's name, config.py and language.py.
"""

from msgspec.structs import replace

from memfit.estimators.arch.families import dense_models, moe_models, towers_glm, towers_llama
from memfit.estimators.arch.families.dense import Dense, HeadDim, Key, QKNorm
from memfit.estimators.arch.families.wrappers import Wrapper
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model, Part, array, embedding, norm
from memfit.estimators.arch.registry import NESTED, ROTARY, VisionTraits
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never

_GLM4V = replace(
    dense_models.GLM4,
    head_dim=HeadDim.DERIVED,
    input_bias=Key("attention_bias", True),
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "vocab_size": 151552,
    },
)
_GLM_OCR = replace(
    _GLM4V,
    head_dim=HeadDim.GIVEN,
    input_bias=Key("attention_bias", False),
    defaults={
        "hidden_size": 1536,
        "num_hidden_layers": 16,
        "intermediate_size": 4608,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 59392,
    },
)
# Qwen2's layers with the bias, Qwen3's without.
_INTERNVL = Dense(
    kv_optional=True,
    head_dim=HeadDim.OPTIONAL,
    defaults={"num_key_value_heads": 8},
    input_bias=Key("attention_bias", True),
    qk_norm=QKNorm.HEAD,
    qk_norm_on=Key("attention_bias", True, inverted=True),
    tied=Key("tie_word_embeddings", False),
)
_MLLAMA = Dense(
    kv_optional=True,
    defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    activation_arrays=1,
    tied=False,
)
_CROSSING = [3, 8, 13, 18, 23, 28, 33, 38]
# Tokens of images, which the head does not predict.
_MLLAMA_MORE_TOKENS = 8


def _glm4v_moe(text: Fields) -> Model:
    """GLM-4.5's text model; queries and keys are never normed, and no array stays in float32."""
    model = moe_models.GLM4_MOE.build(text.with_overrides({"use_qk_norm": False}))
    return replace(
        model,
        layers=tuple(
            replace(layer, modules=tuple(replace(m, float32=False) for m in layer.modules))
            for layer in model.layers
        ),
    )


def _internvl(text: Fields) -> Model:
    if text.text("model_type", "qwen2").startswith("internlm"):
        raise text.fail("model_type", "mlx-vlm's class has the layers of Qwen, and cannot load it")
    return _INTERNVL.build(text)


def _mllama(text: Fields) -> Model:
    """Llama's layers, some of which attend to the image in place of the text."""
    model = _MLLAMA.build(text)
    crossing = text.counts("cross_attention_layers", least=0)
    across = frozenset(_CROSSING if crossing is None else crossing)
    tokens, *outside = model.modules
    return replace(
        model,
        layers=tuple(
            _crossing(layer) if index in across else layer
            for index, layer in enumerate(model.layers)
        ),
        modules=(
            embedding(tokens.path, model.vocab_size + _MLLAMA_MORE_TOKENS, model.hidden_size),
            *outside,
        ),
    )


def _crossing(layer: Layer) -> Layer:
    """Keys and values are made of the image for each call, and of the queries without one."""
    [mixer] = layer.mixers
    match mixer:
        case Attention():
            across = replace(mixer, owns_cache=False, qk_norm=True)
        case LatentAttention() | GatedDelta() | Recurrent() | TracedMixer():
            raise AssertionError("Llama's layers attend")
        case _:
            assert_never(mixer)
    return replace(
        layer,
        mixers=(across,),
        modules=(
            *(replace(m, path=m.path.replace("self_attn", "cross_attn")) for m in layer.modules),
            norm("cross_attn.q_norm", across.key_dim),
            norm("cross_attn.k_norm", across.key_dim),
            array("cross_attn_attn_gate", (1,), Part.OTHER),
            array("cross_attn_mlp_gate", (1,), Part.OTHER),
        ),
    )


# What mlx-vlm's classes keep of the tower is added by a runtime for images.
_GLM4V_TOWER = r"^(model\.visual|vision_tower)\."
CLASSES = {
    "glm4v": Wrapper(
        text=_GLM4V.build,
        vision_towers={"glm4v": towers_glm.glm4v},
        drops=_GLM4V_TOWER,
        renames=NESTED,
        only_mlx_vlm=True,
        vision=VisionTraits(joins="rest"),
    ),
    "glm4v_moe": Wrapper(
        text=_glm4v_moe,
        vision_towers={"glm4v_moe": towers_glm.glm4v},
        drops=_GLM4V_TOWER,
        drops_next_layer=r"^(model\.language_model|language_model\.model)\.layers\.",
        renames=NESTED,
        only_mlx_vlm=True,
        vision=VisionTraits(masks_each_block=True, joins="all"),
    ),
    "glm_ocr": Wrapper(
        text=_GLM_OCR.build,
        vision_towers={"glm_ocr": towers_glm.glm_ocr},
        # By number, as the class does: the layer that predicts another token.
        drops=rf"{_GLM4V_TOWER}|layers\.16",
        renames=NESTED,
        only_mlx_vlm=True,
        vision=VisionTraits(norms_heads=True),
    ),
    "internvl_chat": Wrapper(
        text=_internvl,
        section="llm_config",
        vision_towers={"intern_vit_6b": towers_llama.intern_vit},
        drops=r"^vision_model\.",
        only_mlx_vlm=True,
        vision=VisionTraits(rotates=False),
    ),
    "mllama": Wrapper(
        text=_mllama,
        vision_towers={"mllama_vision_model": towers_llama.mllama},
        drops=rf"^(vision_model|vision_tower|multi_modal_projector)\.|{ROTARY}",
        only_mlx_vlm=True,
        vision=VisionTraits(
            rotates=False,
            masks_patches=True,
            joins="tiles",
            patch_multiple=8,
            float32=True,
            stacks_blocks=True,
            crosses=True,
        ),
    ),
}
