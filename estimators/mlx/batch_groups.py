"""What mlx-lm's batch generator runs, and the groups of a batch not prefilled at once.

mlx_lm/generate.py 0.32.2, BatchGenerator: at most ``prefill_batch_size`` sequences are prefilled
together, one chunk after each decode step of those that were prefilled before, and at most
``completion_batch_size`` decode together. Groups end in the order they began, so that the rest is
copied while the responses still refer to the buffers of all.
"""

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

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
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.mlx.arrivals import ClosedLoop, ServedRequest
from memfit.estimators.mlx.batch_buffer import BatchBuffer
from memfit.estimators.mlx.batch_schedule import BatchSchedule, ScheduleMoment
from memfit.estimators.mlx.kv_cache import (
    buffer_counts,
    buffer_token_bytes,
    state_bytes,
    view_bytes,
)


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


# Groups of a longer batch repeat what those of these did: the first ones fill the decoding batch,
# the next ones find it full, and are prefilled while others have ended.
_WAVES = 3
_MOST_ROWS = 2048


class GroupedBatch(Struct, frozen=True):
    """What happens to the sequences of a batch."""

    moments: tuple[ScheduleMoment, ...]
    """Those that can hold the peak; buffers of other groups are in them."""
    rows: int
    """The most sequences that decode together."""


def grouped_batch(model: Model, workload: Workload) -> GroupedBatch:
    """Return what happens to a batch larger than mlx-lm prefills at once.

    Without generated tokens they are the last of the prompt, as few as bring all sequences that
    may decode together into one batch.

    Raises:
        UnsupportedError: for more sequences together than are followed.
    """
    sequences = min(workload.batch, _WAVES * workload.most_decoding)
    if sequences > _MOST_ROWS:
        raise UnsupportedError(
            f"{workload.most_decoding} sequences that decode together: memfit follows at most"
            f" {_MOST_ROWS // _WAVES}"
        )
    request = _request(workload)
    settings = ServerSettings(
        prefill_step=workload.prefill_step,
        prompt_concurrency=workload.prefill_batch,
        decode_concurrency=workload.decode_batch,
        prompt_cache_size=0,
    )
    counts = buffer_counts(model, workload.max_kv_size)
    windows = frozenset(buffer.limit for buffer in counts if buffer.limit)
    return _followed(request, sequences, settings, windows)


@lru_cache(maxsize=256)
def _followed(
    request: ServedRequest, sequences: int, settings: ServerSettings, windows: frozenset[int]
) -> GroupedBatch:
    schedule = BatchSchedule(
        [request] * sequences,
        settings,
        ClosedLoop(sequences),
        windows=windows,
        keeps_prefixes=False,
    )
    moments = tuple(dict.fromkeys(schedule.moments()))
    return GroupedBatch(moments, max(moment.running for moment in moments))


def _request(workload: Workload) -> ServedRequest:
    if workload.max_tokens:
        return ServedRequest(workload.prompt_tokens, workload.max_tokens)
    groups = ceil_div(workload.most_decoding, workload.prefill_batch)
    chunks = ceil_div(workload.prompt_tokens, workload.prefill_step)
    # A group is prefilled in as many decode steps of those before it, and starts in one more.
    generated = min((groups - 1) * (chunks + 1) + 2, workload.prompt_tokens // 2)
    return ServedRequest(workload.prompt_tokens - generated, max(1, generated))


def buffer_bytes(model: Model, workload: Workload, buffer: BatchBuffer) -> int:
    """Return the bytes of the caches and states of a batch."""
    windows = dict(buffer.windows)
    one = state_bytes(model, 1) + view_bytes(model, buffer.viewed)
    for kv, layers in buffer_counts(model, workload.max_kv_size).items():
        # The step by which a cache grows is in the tokens of the buffer.
        tokens = windows[kv.limit] if kv.limit else kv.held_tokens(buffer.capacity)
        one += layers * tokens * buffer_token_bytes(model, kv, workload, tokens)
    return buffer.rows * one


def prefilled_alone(workload: Workload, rows: int, tokens: int) -> Workload:
    """Return the workload of ``rows`` sequences of which ``tokens`` are prefilled together."""
    return replace(workload, batch=rows, prefill_batch=rows, prompt_tokens=tokens + 1, max_tokens=0)


def decoded_alone(workload: Workload, rows: int, tokens: int) -> Workload:
    """Return the workload of a batch that ends with ``tokens`` in the caches of ``rows``.

    No chunk has left more in a window than single tokens do.
    """
    generated = min(2, tokens - 1)
    return replace(
        workload,
        batch=rows,
        prefill_batch=rows,
        prompt_tokens=tokens - generated,
        max_tokens=generated,
        prefill_step=1,
    )
