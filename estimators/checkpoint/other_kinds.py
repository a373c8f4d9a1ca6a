"""Models that are no language models: what they are, by their files or their config."""

from collections.abc import Collection, Mapping
from typing import Any

DIFFUSION = "a diffusion pipeline"
_BY_FILE = {
    "model_index.json": DIFFUSION,  # diffusers, DiffusionPipeline.config_name
    "modules.json": "an embedding model (sentence-transformers)",  # SentenceTransformer
}
# Model types of transformers without a decoder that generates text token by token.
_TYPES = {
    "an encoder, as embedding models are": """albert bert big_bird camembert deberta deberta-v2
        distilbert electra ernie eurobert flaubert funnel gte layoutlm longformer luke modernbert
        mpnet neobert new nomic_bert nystromformer rembert roberta roformer squeezebert xlm
        xlm-roberta xlm-roberta-xl xmod""",
    "an encoder with a decoder": """bart bigbird_pegasus blenderbot fsmt led longt5 m2m_100 marian
        mbart mt5 pegasus prophetnet switch_transformers t5 t5gemma umt5""",
    "a model of speech or sound": """clap encodec hubert mimi musicgen seamless_m4t speecht5 vits
        wav2vec2 wav2vec2-bert wavlm whisper""",
    "a model of images": """align beit blip clip clipseg convnext deit detr dinov2 dinov3_vit dpt
        resnet sam sam2 segformer siglip siglip2 swin vit""",
}
_BY_TYPE = {name: kind for kind, names in _TYPES.items() for name in names.split()}


def kind_of_files(names: Collection[str]) -> str:
    """Return what a repository with these files is; empty for a language model."""
    return next((kind for name, kind in _BY_FILE.items() if name in names), "")


def kind_of_config(config: Mapping[str, Any]) -> str:
    """Return what a config describes; empty for a language model, and where it is not known.

    >>> kind_of_config({"model_type": "bert"}), kind_of_config({"model_type": "llama"})
    ('an encoder, as embedding models are', '')
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        return _BY_TYPE.get(model_type, "")
    # diffusers, configuration_utils.py: every config has both keys.
    return DIFFUSION if {"_class_name", "_diffusers_version"} <= config.keys() else ""
