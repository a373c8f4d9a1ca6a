"""Whether mlx-lm takes a draft model for another, and for a workload."""

from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.tokenizer import tokenizer_size
from memfit.estimators.runtimes.interface import Subject

# Embeddings are padded: those of Qwen2.5 have 151,936 or 152,064 rows for 151,643 tokens; those of
# different tokenizers are rarely nearer than that (Mistral: 32,000 and 32,768).
_MOST_PADDING = 512


def require_same_vocabulary(target: Subject, draft: Subject) -> None:
    """Check what mlx_lm.generate compares: the sizes of both tokenizers (mlx_lm/generate.py, main).

    Without both, embeddings that differ by more than padding are of different tokenizers.

    Raises:
        UnsupportedError: when they differ.
    """
    own, other = tokenizer_size(target.checkpoint), tokenizer_size(draft.checkpoint)
    what, most = "tokenizers of", 0
    if own is None or other is None:
        what, most = "embeddings of", _MOST_PADDING
        own, other = target.model.vocab_size, draft.model.vocab_size
    if abs(own - other) > most:
        raise UnsupportedError(
            f"{draft.checkpoint.id}: cannot draft for {target.checkpoint.id}: {what} {other} and"
            f" {own} tokens; mlx_lm.generate takes a draft model with the same tokenizer only"
        )


def require_drafting(model: Model, workload: Workload) -> None:
    """Check that mlx-lm's loop takes a draft model for a target and a workload.

    Raises:
        UnsupportedError: when it rejects or ignores what is asked.
    """
    if any(True for _ in model.states()):
        raise UnsupportedError(
            f"{model.model_type}: mlx-lm rejects a draft model for it, because recurrent states"
            " cannot be trimmed after a rejected draft"
        )
    if workload.batch > 1:
        raise UnsupportedError("with a draft model mlx-lm generates one sequence: leave out batch")
    if workload.max_kv_size is not None:
        raise UnsupportedError("with a draft model mlx-lm ignores max_kv_size: leave it out")
