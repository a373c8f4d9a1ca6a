"""Traffic that was replayed before a guard: what `memfit replay` answers."""

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count, Positive, Tokens
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.results.result import Result


class ReplayMoment(Struct, frozen=True, kw_only=True):
    """The call with the most memory of a span of calls."""

    call: Count
    """Calls of the batch generator before it."""
    running_bytes: Bytes
    """Weights, batches, and what the call takes."""
    stored_bytes: Bytes
    waiting_bytes: Bytes
    """What the requests that wait need above the weights, each alone."""
    running: Count
    """Requests."""
    waiting: Count
    stored: Count
    """Entries of the prompt cache."""


class RefusedRequest(Struct, frozen=True, kw_only=True):
    """A request that does not fit on the empty server."""

    request: Count
    """Its number, from 1."""
    prompt_tokens: Tokens
    max_tokens: Tokens
    reason: str
    largest_prompt_tokens: Count
    """That would be admitted with the same reply; 0: none."""


class Replay(Result, frozen=True, kw_only=True, tag="memfit.replay/1"):
    """The answer of ``memfit replay``."""

    model: str
    traffic: str
    limit_bytes: Bytes
    weights_bytes: Bytes
    settings: ServerSettings
    requests: Positive
    calls: Count
    peak_bytes: Bytes
    """By memfit's figures without their stated error, which the guard keeps free."""
    over: Count
    """Moments above the limit after everything in them was admitted: must be 0."""
    refused_though_fits: Count
    """Requests that were refused and would have run alone: must be 0."""
    refused: tuple[RefusedRequest, ...]
    waited: Count
    """Requests that could not start when they arrived."""
    waited_in_vain: Count
    """Of those, the ones that could have started as the first of the queue, had all lengths of
    replies been known."""
    cached: Count
    """Requests that began with a stored cache."""
    evicted: Count
    """Entries that made room for a request or a newer entry."""
    not_stored: Count
    """Finished caches for which there was no room."""
    timeline: tuple[ReplayMoment, ...]
    notes: tuple[str, ...]
