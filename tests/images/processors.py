"""The processors of mlx-vlm, built from small files; their tokenizer knows whole words only."""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from memfit.estimators.base.images import Images
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.images.plan import ImagePlan
from memfit.estimators.images.processor import image_plan


class Case(Struct, frozen=True):
    """The files of a processor, the tokens of its tokenizer, and a prompt with one image."""

    config: dict[str, Any]
    prompt: str = "<image>"
    video_prompt: str = ""
    preprocessor: dict[str, Any] = {}
    processor: dict[str, Any] = {}
    video: dict[str, Any] = {}
    named: dict[str, str] = {}
    """Special tokens that the tokenizer has under a name, such as image_token."""
    others: int = 0
    """Tokens that the processor adds in addition to those of images."""
    takes_one: bool = False
    """Whether a prompt has one image at most."""
    one_mark: bool = False
    """Whether all images have their place at one mark."""
    words: tuple[str, ...] = ()
    """Other special tokens."""


def save(case: Case, directory: Path) -> Path:
    """Write the files of a processor, with a tokenizer of single characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>", *case.named.values(), *case.words]
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*special, *letters]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "extra_special_tokens": case.named,
        "added_tokens_decoder": {
            str(vocabulary[word]): {"content": word, "special": True} for word in special
        },
    }
    files = {
        "tokenizer_config.json": described,
        "config.json": case.config,
        "preprocessor_config.json": case.preprocessor,
        "processor_config.json": case.processor,
        "video_preprocessor_config.json": case.video,
    }
    for name, values in files.items():
        if values:
            (directory / name).write_text(json.dumps(values))
    return directory


def loaded(directory: Path) -> Any:
    """Return the processor as mlx-vlm loads it."""
    from mlx_vlm.utils import get_model_and_args, load_config, load_processor

    config = load_config(directory)
    get_model_and_args(config)  # its module installs the processor
    if config["model_type"] == "ernie4_5_moe_vl":
        # Its tokenizer has a SentencePiece file.
        from mlx_vlm.models.ernie4_5_moe_vl import Ernie4_5_VLProcessor
        from transformers import AutoTokenizer

        return Ernie4_5_VLProcessor(tokenizer=AutoTokenizer.from_pretrained(directory))
    processor = load_processor(directory, add_detokenizer=False, trust_remote_code=False)
    if config["model_type"] == "hunyuan_vl":
        processor.image_token, processor.placeholder_token = "<image>", "<place>"
        ids = processor.tokenizer.convert_tokens_to_ids(["<start>", "<end>"])
        processor.im_start_token_id, processor.im_end_token_id = ids
    if config["model_type"] in ("dots_ocr", "hunyuan_vl"):
        # They have the ids of their published tokenizers.
        tokens = processor.tokenizer
        processor.image_token_id = tokens.convert_tokens_to_ids(processor.image_token)
    return processor


def planned(directory: Path, asked: Images) -> ImagePlan:
    """Return memfit's plan of the same files."""
    return image_plan(open_checkpoint(str(directory / "config.json")), asked)
