"""Arrivals of a test that says them call by call."""

from collections.abc import Callable, Sequence


class AtCalls:
    """Requests that are taken before known calls of the generator; idle ones are not counted."""

    def __init__(self, calls: Sequence[int]) -> None:
        self._calls, self._next = calls, 0

    def take(self, call: int, *, is_busy: bool, generated: Callable[[int], int]) -> int:
        first = self._next
        while self._next < len(self._calls) and (self._calls[self._next] <= call or not is_busy):
            self._next, is_busy = self._next + 1, True
        return self._next - first

    def end(self, call: int, count: int) -> None:
        pass

    def quiet(self, call: int, generated: Callable[[int], int]) -> int | None:
        return max(1, self._calls[self._next] - call) if self._next < len(self._calls) else None
