"""Multimodal configs that mlx-vlm has a class for and mlx-lm has none.

Source: mlx_vlm/models of the model type's name, config.py and language.py.
"""

from msgspec.structs import replace

from memfit.estimators.arch.families import dense, dense_models, moe
from memfit.estimators.arch.families.dense_traits import Dense, HeadDim, Key, QKNorm
from memfit.estimators.arch.families.wrappers import Wrapper, wrap
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Part, array, embedding, norm
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never

_GLM4V = replace(
    dense_models.MODELS["glm4"],
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


def build(fields: Fields) -> Model:
    """Return the model of a config with a ``model_type`` of the wrappers."""
    return wrap(fields, WRAPPERS[fields.text("model_type")])


def _glm4v_moe(text: Fields) -> Model:
    """GLM-4.5's text model; queries and keys are never normed, and no array stays in float32."""
    model = moe.build(text.with_overrides({"model_type": "glm4_moe", "use_qk_norm": False}))
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
    return dense.describe(text, _INTERNVL, "internvl_chat")


def _mllama(text: Fields) -> Model:
    """Llama's layers, some of which attend to the image in place of the text."""
    model = dense.describe(text, _MLLAMA, "mllama")
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


WRAPPERS = {
    "glm4v": Wrapper(build=lambda text: dense.describe(text, _GLM4V, "glm4v")),
    "glm4v_moe": Wrapper(build=_glm4v_moe),
    "glm_ocr": Wrapper(build=lambda text: dense.describe(text, _GLM_OCR, "glm_ocr")),
    "internvl_chat": Wrapper(build=_internvl, section="llm_config"),
    "mllama": Wrapper(build=_mllama),
}
