"""How many tokens a model's tokenizer knows, which mlx-lm compares of a model and its draft."""

import json
from collections.abc import Sized

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.checkpoint.checkpoint_files import Directory
from memfit.estimators.checkpoint.manifest import Checkpoint

TOKENIZER = "tokenizer.json"
_MAX_BYTES = 100_000_000  # that of Gemma 3 has 33 MB


def tokenizer_size(checkpoint: Checkpoint) -> int | None:
    """Return the ``vocab_size`` of the tokenizer, without added tokens, as transformers counts it.

    None where it is not in a local tokenizer.json: it is too large to fetch for a check.
    Source: tokenizers, get_vocab_size(with_added_tokens=False).
    """
    files = checkpoint.others
    if not isinstance(files, Directory) or not files.exists(TOKENIZER):
        return None
    try:
        vocabulary = json.loads(files.read(TOKENIZER, limit=_MAX_BYTES))["model"]["vocab"]
    # What cannot be read says nothing; mlx-lm reports it when it loads the model.
    except (MemfitError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return len(vocabulary) if isinstance(vocabulary, Sized) else None
