"""Conversations in memory and on disk, simulated with a request trace."""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct, field

from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.units import ceil_div
from memfit.estimators.plans.offload.session_cache import Storage
from memfit.estimators.results.offload import Simulation, Speeds


class Tiers(Struct, frozen=True):
    """Bytes for conversations in memory and on disk."""

    hot_bytes: int
    disk_bytes: int


def milliseconds(amount: int, per_second: int | None) -> int | None:
    """Return the time an amount takes, rounded up; None when the speed is not known.

    >>> milliseconds(1_120_000_000, 3_500_000_000)
    320
    """
    return None if per_second is None else ceil_div(amount * 1000, per_second)


class _Store(Struct):
    """Both tiers evict the least recently used conversation first."""

    storage: Storage
    tiers: Tiers
    most_kept: int | None
    """Tokens of the longest conversation that may stay in memory, None for any."""
    hot: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Agent to tokens, as ``disk``: the file keeps the tokens it was saved with."""
    disk: OrderedDict[str, int] = field(default_factory=OrderedDict)
    seen: set[str] = field(default_factory=set)
    hot_bytes: int = 0
    disk_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    largest_hot: int = 0
    largest_disk: int = 0

    def find(self, agent: str) -> tuple[str, int]:
        """Return the tier and the tokens of a conversation, and take it out of memory."""
        if agent in self.hot:
            tokens = self.hot.pop(agent)
            self.hot_bytes -= self.storage.stored_bytes(tokens)
            return "hot", tokens
        if agent in self.disk:
            self.disk.move_to_end(agent)
            tokens = self.disk[agent]
            self.read_bytes += self.storage.stored_bytes(tokens)
            return "warm", tokens
        was_seen = agent in self.seen
        self.seen.add(agent)
        return ("cold" if was_seen else "new"), 0

    def keep(self, agent: str, tokens: int) -> None:
        """Put a conversation into memory, and write what it evicts to disk.

        A conversation larger than the memory tier, or too long to stay, goes to disk directly.
        """
        is_long = self.most_kept is not None and tokens > self.most_kept
        if is_long or self.storage.stored_bytes(tokens) > self.tiers.hot_bytes:
            self._save(agent, tokens)
            return
        self.hot[agent] = tokens
        self.hot_bytes += self.storage.stored_bytes(tokens)
        while self.hot_bytes > self.tiers.hot_bytes:
            oldest, length = self.hot.popitem(last=False)
            self.hot_bytes -= self.storage.stored_bytes(length)
            self._save(oldest, length)
        self.largest_hot = max(self.largest_hot, self.hot_bytes)

    def _save(self, agent: str, tokens: int) -> None:
        size = self.storage.stored_bytes(tokens)
        if self.disk.get(agent) == tokens:
            self.disk.move_to_end(agent)
            return
        self._delete(agent)
        if size > self.tiers.disk_bytes:
            return
        # Space is freed before the file is written.
        while self.disk_bytes + size > self.tiers.disk_bytes:
            self._delete(next(iter(self.disk)))
        self.disk[agent] = tokens
        self.disk_bytes += size
        self.written_bytes += size
        self.largest_disk = max(self.largest_disk, self.disk_bytes)

    def _delete(self, agent: str) -> None:
        if agent in self.disk:
            self.disk_bytes -= self.storage.stored_bytes(self.disk.pop(agent))


def simulate(
    requests: Sequence[TraceRequest],
    storage: Storage,
    tiers: Tiers,
    speeds: Speeds,
    *,
    most_kept: int | None = None,
) -> Simulation:
    """Return what happens when each request uses and extends its agent's conversation.

    A conversation of more than ``most_kept`` tokens is written to disk as soon as its request ends.

    A cached conversation that is longer than the next prompt is used up to the length of the
    prompt, as agent-memory does with a common prefix. The last prompt token is always computed.
    """
    store = _Store(storage, tiers, most_kept)
    found: dict[str, int] = dict.fromkeys(("hot", "warm", "cold", "new"), 0)
    prefilled = saved = 0
    for request in requests:
        tier, tokens = store.find(request.agent)
        found[tier] += 1
        reused = min(tokens, request.prompt_tokens - 1)
        saved += reused
        prefilled += request.prompt_tokens - reused
        store.keep(request.agent, request.total_tokens)
    return Simulation(
        requests=len(requests),
        agents=len(store.seen),
        **found,
        read_bytes=store.read_bytes,
        written_bytes=store.written_bytes,
        prefill_tokens=prefilled,
        saved_tokens=saved,
        largest_hot_bytes=store.largest_hot,
        largest_disk_bytes=store.largest_disk,
        read_ms=milliseconds(store.read_bytes, speeds.read),
        write_ms=milliseconds(store.written_bytes, speeds.write),
        prefill_ms=milliseconds(prefilled, speeds.prefill),
        uncached_prefill_ms=milliseconds(prefilled + saved, speeds.prefill),
    )
