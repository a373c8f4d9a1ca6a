"""Conversations in memory, on disk and given up, followed through a trace of requests."""

import csv
import io
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.records import record
from memfit.estimators.base.units import ceil_div, parse_count
from memfit.estimators.plans.offload.session_cache import Storage
from memfit.estimators.results.offload import Simulation

COLUMNS = ("agent", "prompt_tokens", "completion_tokens")
_MOST_BYTES = 64 * 10**6
_MOST_REQUESTS = 1_000_000
_LONGEST_FIELD = 4096
_MOST_TOKENS = 2**30


@record(frozen=True, slots=True)
class AgentRequest:
    """One request: the whole prompt with all that was said before, and what is answered."""

    agent: str
    prompt_tokens: int
    completion_tokens: int


@record(frozen=True, slots=True)
class Speeds:
    """Bytes a second of the disk, and tokens a second of prefill; None where not known.

    Raises:
        InputError: when one is not positive.
    """

    read: int | None = None
    write: int | None = None
    prefill: int | None = None

    def __post_init__(self) -> None:
        for name, speed in (("read", self.read), ("write", self.write), ("prefill", self.prefill)):
            if speed is not None and speed < 1:
                raise InputError(f"{name} speed {speed}: must be at least 1 a second")


@record(frozen=True, slots=True)
class Tiers:
    """Bytes for conversations in memory and on disk."""

    hot_bytes: int
    disk_bytes: int


def milliseconds(amount: int, a_second: int | None) -> int | None:
    """Return how long an amount takes, rounded up; None when the speed is not known.

    >>> milliseconds(1_120_000_000, 3_500_000_000)
    320
    """
    return None if a_second is None else ceil_div(amount * 1000, a_second)


@dataclass(slots=True)
class _Store:
    """Least recently used first in both tiers; the disk keeps what a hot one was saved as."""

    storage: Storage
    tiers: Tiers
    hot: OrderedDict[str, int] = field(default_factory=OrderedDict)  # agent, tokens
    disk: OrderedDict[str, int] = field(default_factory=OrderedDict)
    seen: set[str] = field(default_factory=set)
    hot_bytes: int = 0
    disk_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    largest_hot: int = 0
    largest_disk: int = 0

    def find(self, agent: str) -> tuple[str, int]:
        """Return in which tier a conversation is, and its tokens; it is in none after that."""
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
        """Put a conversation into memory, and what it pushes out onto the disk.

        One that is larger than all of that memory goes to the disk at once.
        """
        if self.storage.stored_bytes(tokens) > self.tiers.hot_bytes:
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
        self._forget(agent)
        if size > self.tiers.disk_bytes:
            return
        # Room is made first: a file is written beside the others before any is replaced.
        while self.disk_bytes + size > self.tiers.disk_bytes:
            self._forget(next(iter(self.disk)))
        self.disk[agent] = tokens
        self.disk_bytes += size
        self.written_bytes += size
        self.largest_disk = max(self.largest_disk, self.disk_bytes)

    def _forget(self, agent: str) -> None:
        if agent in self.disk:
            self.disk_bytes -= self.storage.stored_bytes(self.disk.pop(agent))


def simulate(
    requests: Sequence[AgentRequest], storage: Storage, tiers: Tiers, speeds: Speeds
) -> Simulation:
    """Return what the requests meet when the least recently used conversation leaves first.

    A conversation that is longer than its next prompt is used as far as the prompt goes, as
    agent-memory does with a common prefix.
    """
    store = _Store(storage, tiers)
    found: dict[str, int] = dict.fromkeys(("hot", "warm", "cold", "new"), 0)
    prefilled = saved = 0
    for request in requests:
        tier, tokens = store.find(request.agent)
        found[tier] += 1
        reused = min(tokens, request.prompt_tokens - 1)
        saved += reused
        prefilled += request.prompt_tokens - reused
        store.keep(request.agent, request.prompt_tokens + request.completion_tokens)
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


def read_requests(path: Path) -> tuple[AgentRequest, ...]:
    """Return the requests of a CSV file with a heading, or of JSON Lines, in their order.

    Each has ``agent``, ``prompt_tokens`` (the whole prompt) and ``completion_tokens``.

    Raises:
        InputError: when the file cannot be read, or a line is no such request.
    """
    try:
        text = read_whole(path, limit=_MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{printable(path)}: is not UTF-8 at byte {error.start}") from None
    rows = _objects if path.suffix.lower() in (".jsonl", ".ndjson") else _records
    requests: list[AgentRequest] = []
    for line, row in rows(text, path):
        if len(requests) == _MOST_REQUESTS:
            raise InputError(f"{printable(path)}: more than {_MOST_REQUESTS} requests")
        requests.append(_request(row, f"{printable(path)}: line {line}"))
    if not requests:
        raise InputError(f"{printable(path)}: holds no request")
    return tuple(requests)


Row = dict[str, object]


def _records(text: str, path: Path) -> Iterator[tuple[int, Row]]:
    lines = text.splitlines()
    if any(len(line) > _LONGEST_FIELD for line in lines):
        raise InputError(f"{printable(path)}: a line of more than {_LONGEST_FIELD} characters")
    reader = csv.DictReader(io.StringIO(text), strict=True, restval="", restkey="")
    try:
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(
                f"{printable(path)}: line 1: no column {missing[0]}; it needs a heading"
            )
        for row in reader:
            yield reader.line_num, dict(row)
    except csv.Error as error:
        raise InputError(f"{printable(path)}: line {reader.reader.line_num}: {error}") from None


def _objects(text: str, path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{printable(path)}: line {number}"
        if len(line) > _LONGEST_FIELD:
            raise InputError(f"{where}: is longer than {_LONGEST_FIELD} characters")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: is not JSON") from None
        if not isinstance(row, dict):
            raise InputError(f"{where}: expected an object")
        yield number, row


def _request(row: Row, where: str) -> AgentRequest:
    agent = row.get("agent")
    if not isinstance(agent, str) or not agent.strip():
        raise InputError(f"{where}: agent: expected a name")
    return AgentRequest(
        agent.strip(),
        _tokens(row, "prompt_tokens", where, 1),
        _tokens(row, "completion_tokens", where, 0),
    )


def _tokens(row: Row, key: str, where: str, least: int) -> int:
    value = row.get(key)
    read: Callable[[str], int] = parse_count
    try:
        tokens = read(value) if isinstance(value, str) else value
    except InputError as error:
        raise InputError(f"{where}: {key}: {error}") from None
    if type(tokens) is not int or not least <= tokens <= _MOST_TOKENS:
        raise InputError(
            f"{where}: {key}: expected a count from {least} to {_MOST_TOKENS},"
            f" got {printable(value)}"
        )
    return tokens
