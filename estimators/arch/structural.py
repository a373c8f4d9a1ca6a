"""Config keys that look as if they shaped the model and that nobody read.

A key nobody read is a size nobody counted: it is named, never dropped. Keys that are known to
change no byte under mlx-lm are listed here, in one place for all families.
"""

import re
from collections.abc import Iterator
from typing import Any

from memfit.estimators.arch.fields import Fields
from memfit.estimators.base.files import printable

_STRUCTURAL = """
    layer head expert dim size window rank block state conv kernel group chunk interval pattern
    freq mlp attn attention mixer moe ssm mamba latent index sparse shared vocab compress width
    depth channel expand ngram memory cache recurrent hidden skip dense linear delta
    """.split()

_IGNORED_PATTERN = (
    r"(^|_)(token_ids?|token_index|token|dropout|drop|eps|epsilon|theta|base|coef|alpha|beta|std"
    r"|initializer_range|scale|multiplier|scaling|act|activation|method|type|dtype|version|impl"
    r"|implementation|init|rate|prob|loss|limit|path|name|softcap|softcapping|cap|fmt)(_|$)"
    r"|^(rope|rotary|_|transformers|output_|return_|id2|label2|begin_|bos|eos|pad|sep|decoder_start"
    r"|auto_map|architectures|quantization|torch|training|use_cache|generation|prefix|tokenizer)"
)

# Keys that name sizes of what mlx-lm never builds, or that only training and other runtimes use.
_IGNORED = frozenset(
    """
    chunk_size_feed_forward cross_attention_hidden_size add_cross_attention is_encoder_decoder
    pruned_heads num_return_sequences num_beams num_beam_groups no_repeat_ngram_size
    encoder_no_repeat_ngram_size tie_encoder_decoder is_decoder cache_implementation
    gradient_checkpointing use_cache num_labels
    num_nextn_predict_layers mtp_transformer_layers num_mtp_modules mtp_num_hidden_layers
    mtp_num_layers ep_size
    mtp_use_dedicated_embeddings num_mtp_layers use_mtp
    original_max_position_embeddings for_llm_compressor
    """.split()
)


def looks_structural(key: str) -> bool:
    """Return whether a key is named as those that shape a model are."""
    return any(part in key for part in _STRUCTURAL) and not is_ignored(key)


def is_ignored(key: str) -> bool:
    """Return whether a key is named as those that change no byte are."""
    return re.search(_IGNORED_PATTERN, key) is not None


def unread_keys(fields: Fields) -> Iterator[str]:
    """Yield every key, as messages show it, that looks structural, is on and was not read."""
    for key, value in fields.unread().items():
        if _is_off(value) or key in _IGNORED:
            continue
        if looks_structural(key):
            yield printable(fields.full_path(key))
    for section in fields.sections:
        yield from unread_keys(section)


def _is_off(value: Any) -> bool:
    """Whether the value switches its feature off or cannot be a size."""
    return value in (None, False, 0, "", [], {}) or isinstance(value, (float, str))
