"""Which described family a model of an unknown type is like, by the keys of its config."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from memfit.estimators.arch.fields import (
    Fields,
    config_fields,
    is_ignored,
    looks_structural,
    unread_keys,
)
from memfit.estimators.arch.registry import FAMILIES, class_row
from memfit.estimators.base.errors import ConfigError, UnsupportedError
from memfit.estimators.base.nearest import nearest

# In the names of parts that draft for another model, and of models that do not generate text
# token by token.
_OTHER_NAMES = re.compile(
    r"mtp|assistant|dflash|dspark|eagle|draft|speculator|medusa|bert|encoder|embed|diffusion|llada"
    r"|dream|tts|whisper|audio|speech|clip|maskedlm|classification"
)
# Keys of the configs of drafters (mlx-vlm 0.7.10, speculative/drafters/*/config.py), of masked
# diffusion, and of models with an encoder.
_OTHER_KEYS = """
    block_size mask_token_id draft_vocab_size speculators_model_type target_hidden_size
    target_layer_ids num_target_layers backbone_hidden_size backbone_model_type
    is_encoder_decoder
    """.split()


def is_other_kind(config: Mapping[str, Any]) -> bool:
    """Return whether a config is of a drafter, or of no model that generates text by tokens.

    >>> is_other_kind({"model_type": "qwen3_5_mtp"}), is_other_kind({"model_type": "qwen4"})
    (True, False)
    >>> is_other_kind({"model_type": "llama", "draft_vocab_size": 32000})
    True
    """
    names = f"{config.get('model_type')} {config.get('architectures')}".lower()
    return any(map(config.get, _OTHER_KEYS)) or _OTHER_NAMES.search(names) is not None


def like(config: Mapping[str, Any]) -> str:
    """Return the described model type whose structure a config has; empty where none has it.

    Such a type finds its required keys there, reads every key that looks structural, and asks for
    the fewest that are absent. The name decides only between types that this does not tell apart.
    """
    if _differs_by_tower(config):
        return ""
    absent = {each: count for each in FAMILIES if (count := _absent(config, each)) is not None}
    fewest = min(absent.values(), default=0)
    tied = [each for each in absent if absent[each] == fewest]
    named = nearest(str(config.get("model_type"))[:60], tied, most=1)
    return named or ("llama" if "llama" in absent else "".join(tied[:1]))


def _differs_by_tower(config: Mapping[str, Any]) -> bool:
    """Whether the language part is a plain one, so that only the tower, not compared, differs."""
    if not config.get("vision_config"):
        return False
    plain = {key: value for key, value in config.items() if key != "vision_config"}
    text = plain.get("text_config", plain)
    return not isinstance(text, dict) or _absent(text, "llama") is not None


def _absent(config: Mapping[str, Any], model_type: str) -> int | None:
    """How many structural keys of a type are absent; None where the config is not of its kind."""
    fields, row = (
        config_fields({**config, "model_type": model_type}, "config"),
        class_row(model_type),
    )
    assert row
    try:
        model = row.build(fields)
    except (ConfigError, UnsupportedError):
        return None
    found = list(_found(fields))
    absent = found.count(False)
    # By its defaults alone a class builds a model of any config; a single layer is a head.
    is_like = 2 * absent < len(found) and len(model.layers) > 1
    return absent if is_like and not any(_unread(fields)) else None


def _found(fields: Fields) -> Iterator[bool]:
    """Yield for every structural key that was read whether it is there."""
    for key, value in fields.read().items():
        if looks_structural(key) and not isinstance(value, dict):
            yield value is not None
    for section in fields.sections:
        yield from _found(section)


def _unread(fields: Fields) -> Iterator[str]:
    """Yield the structural keys that nobody read, and the parts of the model."""
    yield from unread_keys(fields)
    for key, value in fields.unread().items():
        if isinstance(value, dict) and key.endswith("_config") and not is_ignored(key):
            yield key
