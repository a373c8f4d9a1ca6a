"""What mlx-lm's batch generator runs: mlx_lm/generate.py, BatchGenerator."""

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError


def merges_caches(model: Model) -> bool:
    """Whether it takes the model's caches; others are run one sequence after another."""
    return all(buffer.growth.merges for buffer in model.kv_buffers())


def require_batch(model: Model, batch: int) -> None:
    """Do nothing when the model's class runs a batch of this size.

    Raises:
        UnsupportedError: when it fails on them.
    """
    for mixer in model.mixers() if batch > 1 else ():
        match mixer:
            # mlx-lm gemma2.py: scores (B, kv heads, groups, L, S), a mask of (B, 1, L, S).
            case Attention(fused=False) if mixer.heads > mixer.kv_heads != batch:
                raise UnsupportedError(
                    f"{model.model_type}: mlx-lm's class fails on a batch of {batch} sequences: its"
                    " scores have an axis for groups of heads that the mask of a batch has not"
                )
            case Attention() | LatentAttention() | GatedDelta() | Recurrent() | TracedMixer():
                pass
            case _:
                assert_never(mixer)
