"""What a checkpoint is that is no language model by itself: rows of types, classes and keys.

Sources: transformers 5.24.0 and the classes of mlx-vlm 0.7.10 (models, speculative/drafters),
mlx-audio 0.6.2 ({tts,stt,sts,codec,vad,lid}/models) and diffusers.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from memfit.estimators.checkpoint.manifest import Checkpoint


class Kind(NamedTuple):
    """A kind of model: what it is, and what of its memory is not decided."""

    name: str
    undecided: str
    types: str = ""  # model types, whole
    pattern: str = r"(?!)"  # found in a model type, in lower case
    classes: str = r"(?!)"  # found in one of the architectures
    keys: str = ""  # keys of a config, any of them with a value


_FORWARD = "one forward of batch x length tokens, and what a server that never clears then holds"
_STEPS = "what a step computes with, at the size of its output"
_AUDIO = "what a length of sound takes: features, caches, decoder"
_DRAFT = "its own cache, states kept for rollback, logits of the drafts; it runs beside its target"

# A base class has no head: "Qwen3Model" makes hidden states, "Qwen3ForCausalLM" tokens.
_BASE_CLASS = (
    r"^(Llama|Mistral|Mixtral|Ministral3?|Qwen[23](Moe)?|Gemma[23]?|Gemma3Text|Phi3?|Lfm2|Granite)"
    r"Model$"
)
EMBEDDING = Kind(
    "an embedding model, or a reranker",
    _FORWARD,
    types="""colidefics3 colqwen2 colqwen2_5 colpali gliner2_5 llama_bidirec lfm2_colbert
        lfm2_encoder nvembed openai_privacy_filter""",
    pattern=r"(^|_)embed(ding|dings)?(\d?$|_)|^embedding_|rerank",
    classes=r"For(Sequence|Token)Classification$|For(MaskedLM|QuestionAnswering|MultipleChoice)$"
    rf"|Bidirec|Embed(ding)?s?(Model)?$|ReRank|Rerank|RewardModel|BoundaryExtractor|{_BASE_CLASS}",
)
DIFFUSION = Kind(
    "a diffusion pipeline",
    _STEPS,
    types="""bonsai ernie_image flux2 flux3 ideogram4 llada_image mage_flow ming_image moss_image
        qwen_image z_image""",
    # diffusers, configuration_utils.py: every config has both keys.
    keys="_class_name+_diffusers_version",
)
_KINDS = (
    Kind(
        "a drafter",
        _DRAFT,
        pattern=r"_(mtp|nextn)$|_assistant$|dspark|dflash|^eagle|^medusa|speculator",
        classes=r"(?i)eagle|dflash|dspark|medusa|speculator|draft|mtp|assistant",
        keys="draft_vocab_size speculators_model_type dflash_config backbone_hidden_size",
    ),
    Kind(
        "an encoder, as embedding models are",
        _FORWARD,
        types="""albert bert big_bird camembert deberta deberta-v2 distilbert electra ernie
            eurobert flaubert funnel gte jina_bert layoutlm longformer luke modernbert mpnet
            neobert new nomic_bert nystromformer rembert roberta roformer squeezebert xlm
            xlm-roberta xlm-roberta-xl xlm_roberta xmod""",
    ),
    Kind(
        "an encoder with a decoder",
        "the encoder's forward and the cache of cross attention",
        types="""bart bigbird_pegasus blenderbot fsmt led longt5 m2m_100 marian mbart mt5 pegasus
            prophetnet switch_transformers t5 t5gemma umt5""",
    ),
    Kind(
        "a model of speech or sound",
        _AUDIO,
        types="""audiodit bark breeze canary clap csm dacvae deepfilternet dia dramabox ecapa_tdnn
            encodec fish_qwen3_omni fun_asr_nano glmasr granite_speech higgs_audio_3
            higgs_multimodal_qwen3 hubert indextts kitten kokoro kugelaudio lfm_audio marvis melotts
            mimi mms moonshine moshi musicgen omnivoice outetts parakeet qwen2_audio
            qwen3_forced_aligner sam_audio seamless_m4t sensevoice sesame snac soprano spark
            speecht5 vibevoice vits vocos voxtral voxtral_realtime wav2vec2 wav2vec2-bert wavlm
            whisper""",
        pattern=r"(^|[_-])(tts|asr|codec)($|[_-])|^(chatterbox|vibevoice|voxcpm|wav2vec)"
        r"|^nemo\.collections",
        keys="istftnet n_audio_ctx n_mels",
    ),
    Kind(
        "a model of images",
        "its activations at the size of the image",
        types="""align beit blip clip clipseg convnext deit detr dinov2 dinov3_vit dpt moge3
            pp_doclayout_v3 resnet rfdetr rt_detr_v2 sam sam2 sam3 sam3_video sam3d_body
            sam3d_objects sapiens2 segformer siglip siglip2 swin video_depth_anything vit yolo11""",
    ),
    Kind(
        "a masked diffusion model, which computes all tokens in each step and keeps no cache",
        _STEPS,
        types="Dream dream llada llada_moe rnd1",
    ),
    Kind(
        "a model that decides on a whole prompt at once and keeps no cache",
        _FORWARD,
        types="clef decider2 laya",
    ),
    DIFFUSION,
    EMBEDDING,
)
_BY_TYPE = {name: kind for kind in _KINDS for name in kind.types.split()}
_BY_FILE = {
    "model_index.json": DIFFUSION.name,  # diffusers, DiffusionPipeline.config_name
    "modules.json": "an embedding model (sentence-transformers)",  # SentenceTransformer
}
# A conversion of Qwen3-Embedding has the config of a generator, and often only its name is left.
_NAMED = re.compile(r"(?i)(^|-)(embed|embeddings?|embeddinggemma|rerank|reranker)(-|$)")
_HEAD_ALONE = re.compile(r"(^|\.)(mtp|nextn)[._]")
MTP_HEAD = "qwen3_5_mtp"
"""The type of a drafter with the prediction layers of `MTP_TARGETS`."""
MTP_TARGETS = ("qwen3_5", "qwen3_5_moe")  # no set: a config may have any JSON as its type
"""Types of which mlx-vlm runs the prediction layers, also out of the target's own files
(mlx_vlm/speculative/drafters/mtp_split.py, MTP_SPLITTERS)."""
_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")
_FORMAT_KEYS = ("quantization", "quantization_config", "dtype", "torch_dtype")
_TARGET_SIZES = {
    "hidden size": ("backbone_hidden_size", "target_hidden_size", "hidden_size"),
    "layers": ("num_target_layers",),
    "vocabulary": ("target_vocab_size", "vocab_size"),
}


def kind_of_files(names: Collection[str]) -> str:
    """Return what a repository with these files is; empty for a language model."""
    return next((kind for name, kind in _BY_FILE.items() if name in names), "")


def kind_of_config(config: Mapping[str, Any]) -> Kind | None:
    """Return what a config describes; None for a language model, and where it is not known.

    >>> [getattr(kind_of_config({"model_type": each}), "name", "") for each in ("bert", "llama")]
    ['an encoder, as embedding models are', '']
    """
    # A config of NeMo has the name of its class in place of a type.
    named_type = config.get("model_type") or config.get("target")
    text = named_type if isinstance(named_type, str) else ""
    if kind := _BY_TYPE.get(text):
        return kind
    classes = config.get("architectures")
    named = [each for each in classes if isinstance(each, str)] if isinstance(classes, list) else []
    for kind in _KINDS:
        if (
            re.search(kind.pattern, text.lower())
            or any(re.search(kind.classes, each) for each in named)
            or any(all(map(config.get, each.split("+"))) for each in kind.keys.split())
        ):
            return kind
    return EMBEDDING if attends_both_ways(config) else None


def predicts_more(config: Mapping[str, Any]) -> bool:
    """Whether a config declares prediction layers (MTP) beside those of its model."""
    text = config.get("text_config")
    sections = (config, text if isinstance(text, Mapping) else {})
    return any(_first_count([each.get(key)]) for each in sections for key in _MTP_KEYS)


def is_mtp_head(checkpoint: Checkpoint) -> bool:
    """Whether it is a head alone, without the embedding of its target."""
    return checkpoint.config.get("model_type") == MTP_HEAD


def prediction_head(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return a checkpoint's prediction layers as mlx-vlm loads them for a draft; None without."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if not is_mtp_head(checkpoint):
        text = config.get("text_config", config)
        if config.get("model_type") not in MTP_TARGETS or not isinstance(text, Mapping):
            return None
        if not text.get("mtp_num_hidden_layers"):
            return None
        formats = {key: config[key] for key in _FORMAT_KEYS if key in config}
        config = {"model_type": MTP_HEAD, "text_config": text, **formats}
        if tensors is not None:
            tensors = tuple(each for each in tensors if each.name.startswith("mtp."))
            if not tensors:
                return None
    if tensors is not None:
        tensors = tuple(each._replace(name=each.name.removeprefix("mtp.")) for each in tensors)
    return replace(checkpoint, config=config, tensors=tensors)


def block_size(config: Mapping[str, Any]) -> int:
    """Return the tokens that a target checks at once by a head's config (qwen3_5_mtp/config.py)."""
    if size := _first_count([config.get("block_size")]):
        return size
    text = config.get("text_config")
    depth = text.get("mtp_num_hidden_layers") if isinstance(text, Mapping) else None
    return (_first_count([depth]) or 1) + 2


def attends_both_ways(config: Mapping[str, Any]) -> bool:
    """Whether every token attends to all others (Gemma); "vision" is of images alone."""
    text = config.get("text_config")
    sections = (config, text if isinstance(text, Mapping) else {})
    return any(each.get("use_bidirectional_attention") in (True, "all") for each in sections)


def other_kind(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Return what a checkpoint is that is no language model, and what is not decided of it."""
    kind = kind_of_config(checkpoint.config)
    names = [tensor.name for tensor in checkpoint.tensors or ()]
    if not kind and names and all(map(_HEAD_ALONE.search, names)):
        kind = _KINDS[0]
    if kind is _KINDS[0]:
        return f"{_drafter(checkpoint.config)}, not a language model", kind.undecided
    if kind:
        return f"{kind.name}, not a language model", kind.undecided
    if checkpoint.assumed_from is not None:  # the type is the user's word
        return None
    if by_file := checkpoint.other_kind:
        undecided = _STEPS if by_file == DIFFUSION.name else _FORWARD
        return f"{by_file}, not a language model", undecided
    last = re.split(r"[/\\]", checkpoint.to_load.rstrip("/\\"))[-1].partition("@")[0]
    if _NAMED.search(last):
        return f"{EMBEDDING.name} by its name, not a language model", _FORWARD
    if "embed_tokens.weight" in names:  # sentence-transformers saves a base class
        return "a base class without a head, as embedding models are", _FORWARD
    return None


def _drafter(config: Mapping[str, Any]) -> str:
    """Name a drafter, and the target that its config describes."""
    of = f" for {target}" if (target := ", ".join(_target(config))) else ""
    return f"a drafter ({_method(config)}){of}"


def _method(config: Mapping[str, Any]) -> str:
    words = [config.get(key) for key in ("model_type", "architectures", "speculators_model_type")]
    keys = [key for key in ("dflash_config", "draft_vocab_size") if config.get(key)]
    text = f"{words} {keys}".lower()
    ways = {
        "dspark": "DSpark",
        "dflash": "DFlash",
        "assistant": "an assistant",
        "medusa": "Medusa",
        "eagle|draft_vocab_size": "EAGLE",
        "mtp|nextn": "an MTP head",
    }
    return next((way for word, way in ways.items() if re.search(word, text)), "a speculator")


def _target(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a drafter's config says of its target: its name or family, and its sizes."""
    parts = map(config.get, ("text_config", "transformer_layer_config"))
    sections = (config, *(part for part in parts if isinstance(part, Mapping)))
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    family = re.sub(
        r"_(mtp|nextn|assistant|dspark|dflash)$", "", str(config.get("model_type") or "")
    )
    yield str(name)[:60] if name else f"a {family[:40]} target" if family else "a target"
    for label, keys in _TARGET_SIZES.items():
        if size := _first_count(section.get(key) for key in keys for section in sections):
            yield f"{label} {size}"


def _first_count(values: Iterable[object]) -> int | None:
    return next((value for value in values if type(value) is int and value > 0), None)
