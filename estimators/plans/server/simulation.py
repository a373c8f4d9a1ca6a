"""What a server takes under some requests, by its schedule."""

from collections.abc import Sequence

from msgspec import Struct

from memfit.estimators.base.server_settings import ServerSettings
from memfit.estimators.mlx.arrivals import Arrivals, Request
from memfit.estimators.mlx.batch_schedule import BatchSchedule, Moment
from memfit.estimators.results.server import ServerMoment
from memfit.estimators.sizing.server_memory import ServerMemory


class Simulated(Struct, frozen=True):
    """The largest moment of some requests, and what follows from all of them."""

    largest: ServerMoment
    idle_bytes: int
    """What stays in memory when every request has ended."""
    waited: int
    """Requests that found no room when they arrived."""


def simulated(
    memory: ServerMemory,
    requests: Sequence[Request],
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
    sizes = [size_of(memory, each, settings.prefill_step) for each in moments]
    last = schedule.idle()
    return Simulated(
        max(sizes, key=lambda moment: moment.peak_bytes),
        memory.sized.resident_bytes + sum(map(memory.cache_bytes, last.buffers)),
        schedule.waited,
    )


def size_of(memory: ServerMemory, moment: Moment, step: int) -> ServerMoment:
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
