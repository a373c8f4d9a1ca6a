"""Which calls of the model a run of mlx-lm makes, of those that can hold its peak.

mlx_lm/generate.py, generate_step: the prompt in chunks of ``prefill_step``, all but its last token,
then one token at a time. A call needs the more memory the more tokens it has and the more are in
the caches before it, so that few calls of a run can be the largest.

mlx_lm/generate.py 0.32.2, BatchGenerator: at most ``prefill_batch_size`` sequences are prefilled
together, one chunk after each decode step of those that were prefilled before, and at most
``completion_batch_size`` decode together. Groups end in the order they began, so that the rest is
copied while the responses still refer to the buffers of all.
"""

from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import (
    STEP,
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import CallPhase, ServerSettings, Workload
from memfit.estimators.mlx.arrivals import ClosedLoop, ServedRequest
from memfit.estimators.mlx.batch_schedule import BatchSchedule, ScheduleMoment
from memfit.estimators.mlx.kv_cache import (
    BatchBuffer,
    buffer_counts,
    buffer_token_bytes,
    last_growing_chunk,
    state_bytes,
    view_bytes,
)
from memfit.estimators.mlx.versions import MlxVersions

CHUNKS: frozenset[CallPhase] = frozenset(
    {"first_chunk", "converting", "full_chunk", "growing_chunk", "last_chunk"}
)
PREFILL: frozenset[CallPhase] = CHUNKS | {"last_tokens"}


class PlannedCall(NamedTuple):
    """One call of the model on ``tokens`` tokens, with ``position`` tokens before them."""

    phase: CallPhase
    tokens: int
    position: int


def planned_calls(
    workload: Workload,
    versions: MlxVersions = MlxVersions(),  # noqa: B008 - a tuple
) -> tuple[PlannedCall, ...]:
    """Return the calls in the order mlx-lm makes them.

    Older versions sample the first token from the whole last chunk.

    >>> [call[:] for call in planned_calls(Workload(prompt_tokens=5000))]
    [('first_chunk', 2048, 0), ('full_chunk', 2048, 2048), ('last_chunk', 903, 4096), \
('last_token', 1, 4999)]
    >>> [call[:] for call in planned_calls(Workload(prompt_tokens=513, prefill_step=128))][1:-1]
    [('growing_chunk', 128, 256), ('last_chunk', 128, 384)]
    """
    prompt, step, cached = workload.prompt_tokens, workload.prefill_step, workload.cached_tokens
    end = workload.total_tokens - 1
    samples_alone = not versions.has("logits_of_last_chunk")
    chunked = prompt - cached - samples_alone
    calls: dict[int, tuple[CallPhase, int]] = {}
    if workload.max_tokens:
        growing = end - end % STEP
        if growing >= prompt:
            calls[growing] = ("growing", 1)
        calls[end] = ("decode", 1)
    if samples_alone:
        calls[prompt - 1] = ("last_token", 1)
    if chunked:
        whole = (chunked - 1) // step * step
        last, rest = cached + whole, chunked - whole
        calls[last] = ("last_chunk" if samples_alone else "last_tokens", rest)
        if whole > step and rest < step:
            calls[last - step] = ("full_chunk", step)
        if whole or samples_alone:
            calls[cached] = ("first_chunk", min(step, chunked))
        # Chunks that are not a multiple of 256 do not all make a buffer grow.
        if chunked >= step:
            growing = last_growing_chunk(step, cached + chunked, cached)
            calls.setdefault(growing, ("growing_chunk", step))
    converting = _converting(workload)
    if converting is not None:
        chunk = min(step, max(1, prompt - 1 - converting))
        calls.setdefault(converting, ("converting", chunk))
    return tuple(PlannedCall(*calls[position], position) for position in sorted(calls))


class DraftRound(NamedTuple):
    """A step of speculative decoding: tokens are drafted one by one, then checked at once."""

    drafted: tuple[PlannedCall, ...]
    """Of the draft model: its first call, and the one that all others are like."""
    checked: PlannedCall
    """Of the target."""


def prompt_chunks(workload: Workload) -> tuple[PlannedCall, ...]:
    """Return the chunks of a prompt of which the last token is left, by `planned_calls`."""
    return tuple(call for call in planned_calls(workload) if call.phase in CHUNKS)


def planned_rounds(workload: Workload, tokens: int) -> tuple[DraftRound, ...]:
    """Return the steps that can hold the peak, in the order of mlx-lm's loop.

    The first, the last that finds its caches full, and the last of all, with ``tokens`` drafted
    in each. Where a step accepted all, the draft model's next begins with two tokens: it has not
    read its last one. Source: mlx_lm/generate.py, speculative_generate_step.

    >>> rounds = planned_rounds(Workload(prompt_tokens=100, max_tokens=300), 3)
    >>> [round.checked[1:] for round in rounds]
    [(4, 99), (4, 256), (4, 396)]
    >>> [call[1:] for call in rounds[-1].drafted]
    [(2, 395), (1, 397)]
    """
    first = workload.prompt_tokens - 1
    drafted = min(tokens, workload.max_tokens or tokens)
    last = workload.total_tokens - drafted - 1
    positions = {first, *(p for p in (last - last % STEP, last) if p > first)}
    return tuple(_round(position, drafted, first) for position in sorted(positions))


def _round(position: int, drafted: int, first: int) -> DraftRound:
    unread = int(position > first)
    start = PlannedCall("decode", 1 + unread, position - unread)
    others = (PlannedCall("decode", 1, position + 1),) if drafted > 1 else ()
    return DraftRound((start, *others), PlannedCall("decode", drafted + 1, position))


def held_samples(sampled: int) -> int:
    """Return of how many earlier tokens a step finds the log-probabilities held.

    generate_step holds those of the token before, its caller those of the one before that, until it
    gets the next. ``sampled`` tokens were sampled before the step. GenerationBatch and its caller
    do the same.
    """
    return min(2, sampled)


def planned_chunks(
    workload: Workload,
    versions: MlxVersions = MlxVersions(),  # noqa: B008 - a tuple
) -> tuple[PlannedCall, ...]:
    """Return the chunks the formula follows; of quantisation the first that reads what it made.

    The chunk before that one, after which the caches are quantised, is the trace's `converting`.
    """
    step, cached, end = workload.prefill_step, workload.cached_tokens, workload.prompt_tokens - 1
    chunks = {
        call.position: call
        for call in planned_calls(workload, versions)
        if call.position < end and call.phase != "converting"
    }
    if workload.kv_bits is not None and end - cached >= step:
        plain = max(0, workload.quantized_kv_start - cached)
        reading = cached + min((end - cached) // step - 1, ceil_div(plain, step)) * step
        chunks.setdefault(reading, PlannedCall("full_chunk", step, reading))
    return tuple(chunks[position] for position in sorted(chunks))


def converting_chunk(workload: Workload) -> PlannedCall | None:
    """Return the chunk of the prompt after which the caches are quantised, None if none is.

    >>> converting_chunk(Workload(prompt_tokens=8000, kv_bits=8))[:]
    ('converting', 2048, 4096)
    """
    position, end = _converting(workload), workload.prompt_tokens - 1
    if position is None or position >= end:
        return None
    return PlannedCall("converting", min(workload.prefill_step, end - position), position)


def _converting(workload: Workload) -> int | None:
    """Return where the call begins after which mlx-lm quantises the caches."""
    if workload.kv_bits is None or workload.quantized_kv_start > workload.total_tokens:
        return None
    start, cached = max(1, workload.quantized_kv_start), workload.cached_tokens
    if start <= cached:
        return None  # they are stored as they were quantised
    if start >= workload.prompt_tokens:
        return start - 1
    return cached + (start - 1 - cached) // workload.prefill_step * workload.prefill_step


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
    state, one = state_bytes(model, 1) + view_bytes(model, buffer.viewed), 0
    for kv, layers in buffer_counts(model, workload.max_kv_size).items():
        # The step by which a cache grows is in the tokens of the buffer.
        tokens = windows[kv.limit] if kv.limit else kv.held_tokens(buffer.capacity)
        one += layers * tokens * buffer_token_bytes(model, kv, workload, tokens)
    return buffer.rows * one + (buffer.state_rows or buffer.rows) * state


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
