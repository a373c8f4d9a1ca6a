"""How far the work of the measuring process is, and what caches hold then."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from memfit.estimators.trace.cache_stepper import leaves, length_of

# How a caller is told of figures on the way: a name and bytes, tokens or nanoseconds each.
Report = Callable[[dict[str, int]], None]
_REPORT_EVERY_NS = 1_000_000_000


class Watch:
    """What mlx-lm's loop tells on the way; reads the figures between prefill and decode."""

    def __init__(self, caches: list[Any], report: Report) -> None:
        self._caches, self._report = caches, report
        self._start = self._reported = 0
        self._tokens: list[int] = []  # when the first came, and the last
        self.first_token_ns = 0
        self.prefill: dict[str, int] = {}

    @property
    def decode_ns(self) -> int:
        """From the first token to the last: one token fewer than were generated."""
        return self._tokens[-1] - self._tokens[0] if self._tokens else 0

    def start(self) -> None:
        """Begin to count the time."""
        self._start = perf_counter_ns()

    def prompt(self, processed: int, total: int) -> None:
        """So many tokens of the prompt are done."""
        import mlx.core as mx

        if processed == total - 1 or (processed == total and not self.prefill):
            kv, held, ssm = cache_bytes(self._caches, processed)
            self.prefill = {
                "prefill_kv_bytes": kv,
                "prefill_kv_held_bytes": held,
                "prefill_ssm_bytes": ssm,
                "prefill_peak_bytes": max(mx.get_peak_memory(), mx.get_active_memory()),
            }
            mx.reset_peak_memory()
            self._report(self.prefill)
        if processed == total:
            self.first_token_ns = perf_counter_ns() - self._start
            self._report({"first_token_ns": self.first_token_ns})
        elif processed < total - 1:
            self._report({"prompt_tokens_done": processed})

    def token(self) -> None:
        """Another token was generated."""
        now = perf_counter_ns()
        self._tokens[1:] = [now]
        if now - self._reported > _REPORT_EVERY_NS:
            self._reported = now
            self._report({})  # a sign of life


def cache_bytes(caches: list[Any], tokens: int) -> tuple[int, int, int]:
    """Return bytes of keys and values allocated and held, and of states, by the trace's rule."""
    kv = held = ssm = 0
    for cache in leaves(caches):
        if type(cache).__name__ == "ArraysCache":
            ssm += cache.nbytes
        elif not cache.empty():
            limit = getattr(cache, "max_size", getattr(cache, "chunk_size", tokens))
            kv += cache.nbytes
            held += cache.nbytes // length_of(cache) * min(tokens, limit)
    return kv, held, ssm


def state_bytes(caches: list[Any]) -> int:
    """Return the bytes of what caches have of the tokens seen, not of their room."""
    total = 0
    for cache in leaves(caches):
        if type(cache).__name__ == "ArraysCache":
            total += cache.nbytes
        elif not cache.empty():
            length = length_of(cache)
            total += cache.nbytes // length * min(cache.offset, length)
    return total


@contextmanager
def signs_of_life(report: Report, grown: Callable[[], int | None]) -> Iterator[None]:
    """Report inside the block, each second in which a count has moved.

    For work of one long call that tells nothing of itself, such as reading weights.
    """
    over = threading.Event()

    def watch() -> None:
        before = grown()
        while not over.wait(_REPORT_EVERY_NS / 1e9):
            now = grown()
            if now != before:
                report({})
            before = now

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
