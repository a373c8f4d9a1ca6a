"""Requests of a server, and between which of its calls they arrive.

The server reads its queue between calls, once half a second has passed (server.py, TimeBudget):
requests that arrive meanwhile begin together, and a chunk of prompts often takes longer than that.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct


class ServedRequest(Struct, frozen=True):
    """One request: tokens of its prompt, and tokens it generates."""

    prompt_tokens: int
    max_tokens: int
    continues: int | None = None
    """The number of the request whose stored cache it begins with, if that is still there."""
    cached_tokens: int = 0
    """Tokens of the prompt that it takes from there."""
    text: int | None = None
    """Prompt and reply are the beginning of this text; None: of one that no other request has."""


class Arrivals(Protocol):
    """When the requests of a list, in its order, are taken out of the queue."""

    def take(self, call: int, *, is_busy: bool, generated: Callable[[int], int]) -> int:
        """Return how many are taken before a call; ``generated`` is what a request has so far."""

    def end(self, call: int, count: int) -> None:
        """Note that so many replies ended in a call."""

    def quiet(self, call: int, generated: Callable[[int], int]) -> int | None:
        """Return how many calls pass without a new one while no reply ends; None: all."""


class ClosedLoop:
    """Clients that send their next request after a reply, at once or after a pause.

    They wait until ``group`` of them are free: the server sees these together. ``pauses`` are calls
    before each request of the list.
    """

    def __init__(self, clients: int, *, group: int = 1, pauses: Sequence[int] = ()) -> None:
        self._clients, self._group, self._pauses = clients, group, pauses
        self._free, self._next = [0] * clients, 0

    def take(self, call: int, *, is_busy: bool, generated: Callable[[int], int]) -> int:
        count = 0
        if is_busy and self._waits_for_others:
            return 0
        while self._free and not (is_busy and call < self._free[0] + self._pause()):
            self._free.pop(0)
            self._next, count, is_busy = self._next + 1, count + 1, True
        return count

    def end(self, call: int, count: int) -> None:
        self._free += [call] * count

    def quiet(self, call: int, generated: Callable[[int], int]) -> int | None:
        if not self._free or not self._pause() or self._waits_for_others:
            return None
        return max(1, self._free[0] + self._pause() - call)

    @property
    def _waits_for_others(self) -> bool:
        return len(self._free) < min(self._group, self._clients)

    def _pause(self) -> int:
        return self._pauses[self._next] if self._next < len(self._pauses) else 0


class AtTimes:
    """Requests that arrived at recorded times, by how far the others were then.

    A request arrives when those that had ended by then have ended, and those that were open have
    generated their share of that time. ``times`` are of each request, in seconds: when it arrived,
    and when its reply ended; they are sorted by the first.
    """

    def __init__(
        self, requests: Sequence[ServedRequest], times: Sequence[tuple[float, float]]
    ) -> None:
        self._needs: list[dict[int, int]] = []
        open_: list[int] = []
        for number, (time, _) in enumerate(times):
            needs = {
                each: _generated_by(time, *times[each], requests[each].max_tokens) for each in open_
            }
            self._needs.append(needs)
            open_ = [each for each in (*open_, number) if times[each][1] > time]
        self._next = 0

    def take(self, call: int, *, is_busy: bool, generated: Callable[[int], int]) -> int:
        first = self._next
        while self._next < len(self._needs) and not (is_busy and self._left(generated)):
            self._next, is_busy = self._next + 1, True
        return self._next - first

    def end(self, call: int, count: int) -> None:
        pass

    def quiet(self, call: int, generated: Callable[[int], int]) -> int | None:
        return max(1, self._left(generated)) if self._next < len(self._needs) else None

    def _left(self, generated: Callable[[int], int]) -> int:
        """Tokens that the request furthest behind still has to generate before the next arrives."""
        needs = self._needs[self._next]
        return max((need - generated(each) for each, need in needs.items()), default=0)


def _generated_by(time: float, start: float, end: float, tokens: int) -> int:
    return tokens if end <= time else int(tokens * (time - start) / (end - start))
