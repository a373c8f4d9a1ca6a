"""What a server takes under some requests, by its schedule."""

from collections.abc import Collection, Sequence

from msgspec import Struct

from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.mlx.arrivals import Arrivals, ServedRequest
from memfit.estimators.mlx.batch_schedule import BatchSchedule, ScheduleMoment
from memfit.estimators.results.server import ServerMoment
from memfit.estimators.sizing.server_bound import ServerMemory


class Simulated(Struct, frozen=True):
    """The largest moment of some requests, and what follows from all of them."""

    largest: ServerMoment
    idle_bytes: int
    """What stays in memory when every request has ended."""
    waited: int
    """Requests that found no room when they arrived."""
    hits: int
    """Requests that began with a stored cache."""


def simulated(
    memory: ServerMemory,
    requests: Sequence[ServedRequest],
    settings: ServerSettings,
    arrivals: Arrivals,
) -> Simulated:
    """Return what the server takes when these requests arrive so."""
    schedule = BatchSchedule(
        requests,
        settings,
        arrivals,
        windows=memory.windows,
        has_states=memory.has_states,
    )
    # Many moments are equal: each is computed once.
    moments = dict.fromkeys(schedule.moments())
    last = schedule.idle()
    return Simulated(
        _largest(memory, moments, settings.prefill_step),
        memory.sized.resident_bytes + sum(map(memory.cache_bytes, last.buffers)),
        schedule.waited,
        schedule.hits,
    )


def _largest(memory: ServerMemory, moments: Collection[ScheduleMoment], step: int) -> ServerMoment:
    """Return the largest moment, without the chunks of those that cannot be."""
    chunks = [each.prefilled for each in moments if each.prefilled]
    most = 0
    if chunks:
        rows, end = max(each.rows for each in chunks), max(each.index for each in chunks)
        # What a chunk takes does not grow with every token: its stated error is above that.
        most = sum(memory.prefill(rows, end, step)) + max(map(memory.cache_bytes, chunks))
    most += memory.logits_bytes(max(each.running for each in moments), prefilling=False)
    most += memory.sized.resident_bytes + memory.sized.margin_bytes
    held = {each: sum(map(memory.cache_bytes, each.buffers)) for each in moments}
    best: ServerMoment | None = None
    for moment in sorted(moments, key=held.__getitem__, reverse=True):
        if best and held[moment] + most <= best.needed_bytes:
            break
        result = size_of(memory, moment, step)
        best = result if best is None or result.needed_bytes > best.needed_bytes else best
    assert best
    return best


def size_of(memory: ServerMemory, moment: ScheduleMoment, step: int) -> ServerMoment:
    """Return the bytes of a moment."""
    prompts = moment.prefilled
    return memory.answer(
        sum(map(memory.cache_bytes, moment.buffers)),
        prefill=memory.chunk(prompts, step) if prompts else (0, 0),
        logits=memory.logits_bytes(moment.running, prefilling=prompts is not None),
        prompts=prompts.rows if prompts else 0,
        decoding=moment.running,
        stored=moment.stored,
    )
