"""Conversations in memory and on disk, simulated with a request trace."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.units import ceil_div
from memfit.estimators.plans.offload.session_cache import Held, Storage
from memfit.estimators.results.offload import Simulation, Speeds


class Tiers(NamedTuple):
    """Bytes for conversations in memory and on disk."""

    hot_bytes: int
    disk_bytes: int


Found = Literal["hot", "warm", "cold", "new"]
"""In memory, on the disk, evicted before, or the first request of an agent."""


def milliseconds(amount: int, per_second: int | None) -> int | None:
    """Return the time an amount takes, rounded up; None when the speed is not known.

    >>> milliseconds(1_120_000_000, 3_500_000_000)
    320
    """
    return None if per_second is None else ceil_div(amount * 1000, per_second)


class Entry(Protocol):
    """A conversation as it is kept."""

    @property
    def tokens(self) -> int:
        """Its tokens."""

    @property
    def nbytes(self) -> int:
        """Its bytes, in memory and on the disk."""


Kept = TypeVar("Kept", bound=Entry)


class Move(NamedTuple):
    """What a conversation's cache does."""

    agent: str
    action: Literal["write", "forget", "delete"]
    """``forget`` takes it out of memory, ``delete`` off the disk."""


class ConversationTiers(Generic[Kept]):
    """Conversations in memory and on disk; both evict the least recently used one first."""

    def __init__(self, room: Tiers, *, most_kept: int | None = None) -> None:
        """Take the room, and the tokens of the longest that may stay in memory, None for any."""
        self.room, self.most_kept = room, most_kept
        self.hot: OrderedDict[str, Kept] = OrderedDict()
        self.disk: OrderedDict[str, Kept] = OrderedDict()
        """Of each agent, as it was when it was written."""
        self.seen: set[str] = set()
        self.hot_bytes = self.disk_bytes = 0
        self.largest_hot = self.largest_disk = 0

    def find(self, agent: str) -> tuple[Found, Kept | None]:
        """Return where a conversation is and how it is kept, and take it out of memory."""
        if (kept := self.hot.pop(agent, None)) is not None:
            self.hot_bytes -= kept.nbytes
            return "hot", kept
        if agent in self.disk:
            self.disk.move_to_end(agent)
            return "warm", self.disk[agent]
        was_seen = agent in self.seen
        self.seen.add(agent)
        return ("cold" if was_seen else "new"), None

    def keep(self, agent: str, kept: Kept) -> Iterator[Move]:
        """Put a conversation into memory; yield each move before it counts as done.

        A conversation larger than the memory tier, or too long to stay, goes to disk directly.
        """
        is_long = self.most_kept is not None and kept.tokens > self.most_kept
        if is_long or kept.nbytes > self.room.hot_bytes:
            yield from self._save(agent, kept)
            return
        self.hot[agent] = kept
        self.hot_bytes += kept.nbytes
        while self.hot_bytes > self.room.hot_bytes:
            oldest, left = self.hot.popitem(last=False)
            self.hot_bytes -= left.nbytes
            yield from self._save(oldest, left)
        self.largest_hot = max(self.largest_hot, self.hot_bytes)

    def _save(self, agent: str, kept: Kept) -> Iterator[Move]:
        """Write what leaves memory, unless its file has the same tokens already."""
        there = self.disk.get(agent)
        if there is not None and there.tokens == kept.tokens:
            self.disk.move_to_end(agent)
        elif kept.nbytes > self.room.disk_bytes:
            yield from self._delete(agent)
        else:
            # Space is freed before the file is written; the new file replaces the old one.
            if there is not None:
                self.disk_bytes -= self.disk.pop(agent).nbytes
            while self.disk_bytes + kept.nbytes > self.room.disk_bytes:
                yield from self._delete(next(iter(self.disk)))
            yield Move(agent, "write")
            self.disk[agent] = kept
            self.disk_bytes += kept.nbytes
            self.largest_disk = max(self.largest_disk, self.disk_bytes)
        yield Move(agent, "forget")

    def _delete(self, agent: str) -> Iterator[Move]:
        if agent in self.disk:
            yield Move(agent, "delete")
            self.disk_bytes -= self.disk.pop(agent).nbytes


class Conversations(Protocol[Kept]):
    """What is done with the conversations while their requests are replayed."""

    read_bytes: int
    written_bytes: int

    def request(self, request: TraceRequest, found: Found, kept: Kept | None) -> tuple[Kept, int]:
        """Return the conversation after a request, and the tokens of it that were reused."""

    def move(self, move: Move) -> None:
        """Write, forget or delete the cache of a conversation."""


def replay(
    requests: Iterable[TraceRequest],
    conversations: Conversations[Kept],
    room: Tiers,
    *,
    most_kept: int | None = None,
) -> Simulation:
    """Return what happens when each request uses and extends its agent's conversation.

    A conversation of more than ``most_kept`` tokens is written to disk as soon as its request ends.
    """
    tiers: ConversationTiers[Kept] = ConversationTiers(room, most_kept=most_kept)
    found: dict[Found, int] = dict.fromkeys(("hot", "warm", "cold", "new"), 0)
    prefilled = saved = 0
    for request in requests:
        tier, kept = tiers.find(request.agent)
        found[tier] += 1
        extended, reused = conversations.request(request, tier, kept)
        saved += reused
        prefilled += request.prompt_tokens - reused
        for move in tiers.keep(request.agent, extended):
            conversations.move(move)
    return Simulation(
        requests=sum(found.values()),
        agents=len(tiers.seen),
        **found,
        read_bytes=conversations.read_bytes,
        written_bytes=conversations.written_bytes,
        prefill_tokens=prefilled,
        saved_tokens=saved,
        largest_hot_bytes=tiers.largest_hot,
        largest_disk_bytes=tiers.largest_disk,
    )


class _Planned:
    """Conversations of which only the bytes are known."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.extended: dict[str, Held] = {}
        self.read_bytes = self.written_bytes = 0

    def request(self, request: TraceRequest, found: Found, kept: Held | None) -> tuple[Held, int]:
        if kept and found == "warm":
            self.read_bytes += kept.nbytes
        extended = self.storage.after(kept, request)
        self.extended[request.agent] = extended
        return extended, self.storage.reused(kept, request.prompt_tokens)

    def move(self, move: Move) -> None:
        if move.action == "write":
            self.written_bytes += self.extended[move.agent].nbytes


def simulate(
    requests: Iterable[TraceRequest],
    storage: Storage,
    room: Tiers,
    speeds: Speeds,
    *,
    most_kept: int | None = None,
) -> Simulation:
    """Return what `replay` does by computation alone, with the time that it takes."""
    run = replay(requests, _Planned(storage), room, most_kept=most_kept)
    return replace(
        run,
        read_ms=milliseconds(run.read_bytes, speeds.read),
        write_ms=milliseconds(run.written_bytes, speeds.write),
        prefill_ms=milliseconds(run.prefill_tokens, speeds.prefill),
        uncached_prefill_ms=milliseconds(run.prefill_tokens + run.saved_tokens, speeds.prefill),
    )
