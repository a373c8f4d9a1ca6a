"""Prompts as token ids from the model's own tokenizer: the child's part."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.estimators.base.errors import InputError, MemfitError
from memfit.estimators.base.files import list_names, printable
from memfit.estimators.checkpoint.config import CONFIG, read_model_config
from memfit.probes.codeless import UnloadableError, codeless_view
from memfit.probes.loading import one_line

# Repeated when only a number of tokens is given.
SEED_TEXT = "Memory is counted in bytes: weights, caches, and what is in flight between them. "
# Beyond this the ids are repeated: memory does not depend on the content of a prompt.
_MOST_SEED_TOKENS = 16_384
_PLAIN_IDS = 256
_TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}


def prompt_ids(
    path: Path, text: str | None, tokens: int | None
) -> tuple[list[int], tuple[str, ...]]:
    """Return the ids of a text as mlx_lm.generate makes them, or ``tokens`` ids of a seed text.

    Without a tokenizer the ids are plain numbers, and a note says so. For a very large number of
    tokens only the first ids are returned, for the caller to repeat.

    Raises:
        InputError: when the text is empty, or cannot be tokenised.
    """
    if text is not None and not text.strip():
        raise InputError("the prompt is empty")
    config = read_model_config(path / CONFIG)
    vocabulary = _vocabulary(config)
    try:
        tokenizer = model_tokenizer(path, config)
    except NoTokenizerError as error:
        if text is not None:
            raise InputError(f"{printable(path)}: {error}; use --prompt-tokens N") from None
        count = min(_PLAIN_IDS, vocabulary or _PLAIN_IDS, tokens or 1)
        return list(range(count)), (f"{error}: the prompt consists of plain token ids",)
    ids = _of_text(tokenizer, text) if text is not None else _of_seed(tokenizer, tokens or 1)
    return _checked(path, ids, vocabulary), ()


def texts_ids(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of several texts, each as mlx_lm.generate makes them.

    Raises:
        InputError: when a text is empty, or cannot be tokenised.
    """
    config = read_model_config(path / CONFIG)
    try:
        tokenizer = model_tokenizer(path, config)
    except NoTokenizerError as error:
        raise InputError(f"{printable(path)}: {error}; prompts need the model's own") from None
    return [_checked(path, _of_text(tokenizer, text), _vocabulary(config)) for text in texts]


class NoTokenizerError(Exception):
    """There is no tokenizer, or it cannot be loaded; the message says which."""


def model_tokenizer(path: Path, config: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a model directory as mlx-lm loads it.

    Raises:
        NoTokenizerError: when there is none, or it needs code of the repository.
    """
    names = list_names(path)
    if not any(name in _TOKENIZER_FILES or name.endswith(".tiktoken") for name in names):
        raise NoTokenizerError("no tokenizer")
    from mlx_lm.utils import load_tokenizer

    eos = config.get("eos_token_id")
    try:
        with codeless_view(path) as view:
            return load_tokenizer(view, {"trust_remote_code": False}, eos_token_ids=eos)
    except (MemfitError, UnloadableError) as error:
        raise NoTokenizerError(f"its tokenizer cannot be loaded ({error})") from None


def _checked(path: Path, ids: list[int], vocabulary: int | None) -> list[int]:
    if not ids:
        raise InputError("the prompt is empty: the tokenizer returns no tokens for it")
    if vocabulary and max(ids) >= vocabulary:
        raise InputError(
            f"{printable(path)}: its tokenizer returns id {max(ids)}, the model has a vocabulary of"
            f" {vocabulary}; tokenizer and model do not match"
        )
    return ids


def _of_text(tokenizer: Any, text: str) -> list[int]:
    # Source: mlx-lm generate.py, main: the chat template is applied when there is one.
    try:
        has_template = bool(tokenizer.has_chat_template)
        if has_template:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        return list(tokenizer.encode(text, add_special_tokens=not has_template))
    except Exception as error:  # noqa: BLE001 - a template is code of the repository
        raise InputError(
            f"the prompt cannot be tokenised ({type(error).__name__}: {one_line(error)});"
            " use --prompt-tokens N"
        ) from None


def _of_seed(tokenizer: Any, tokens: int) -> list[int]:
    wanted = min(tokens, _MOST_SEED_TOKENS)
    repeats = 1
    while True:
        ids = list(tokenizer.encode(SEED_TEXT * repeats))
        if len(ids) >= wanted:
            return ids[:wanted]
        if repeats > wanted:
            raise InputError("the tokenizer returns no tokens for plain text")
        repeats = max(2 * repeats, repeats * wanted // max(1, len(ids)))


def _vocabulary(config: Mapping[str, Any]) -> int | None:
    text_config = config.get("text_config")
    holders = [config, text_config] if isinstance(text_config, Mapping) else [config]
    sizes = [holder.get("vocab_size") for holder in holders]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)
