"""Admission of requests to mlx-lm's batch generator, such that what was admitted can always finish.

The schedule of all rows is replayed as if none stopped early: a row is prefilled for a known number
of calls, then gains a token in each. Everything that a call takes grows with its rows, tokens and
keys (call_tables.py), so that a row that stops early only takes bytes out of later calls: no course
of events needs more than the replay. That holds under three conditions, which are the caller's:

1. A request waits outside of the generator until `Guard.admit` admits it.
2. A finished cache is kept only where `Guard.store` allows it, and is evaluated at once: a slice of
   a batch that nobody has computed keeps the whole batch in memory (mlx-lm cache.py, extract).
3. `State` has all that is in memory: other bytes, and what the batches' buffers hold now, in which
   rows that ended are until the next call.

Sources: mlx-lm 0.32.2 generate.py (BatchGenerator._next), cache.py (BatchKVCache).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.specs import STEP
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.guard.call_tables import LONGEST_STEP, MOST_ROWS, CallTables
from memfit.estimators.guard.state import Entry, Request, Row, State, require_counts

STEPS = (8192, 4096, 2048, 1024, 512, 256, 128)


class Admit(Struct, frozen=True):
    """The request can start, and everything can finish."""

    step: int
    """The prefill step from now on, until no prompt is prefilled."""
    peak_bytes: int
    """The most that can be in memory from now on."""
    ends_with: int
    """Tokens in the request's caches at its longest."""


class Evict(Struct, frozen=True):
    """The request can start once these entries are gone; none of them is there in vain."""

    ids: tuple[Any, ...]
    nbytes: int


class Wait(Struct, frozen=True):
    """The request has to wait for running ones."""

    excess_bytes: int
    """Beyond the limit; 0: no row is free."""
    row: Any
    """The widest running row: all others are as wide as it."""
    width: int
    """Of that row at its end, in tokens."""


class Refuse(Struct, frozen=True):
    """The request does not fit on the empty server either."""

    reason: str
    largest_prompt: int
    """The most new tokens that would be admitted there; 0: none."""


Decision = Admit | Evict | Wait | Refuse


class _Run(Struct, frozen=True):
    """A row in the replay: it begins to decode in call ``start``, and is gone after ``end``."""

    start: int
    end: int
    tokens: int
    goal: int
    """Tokens in its caches when it begins to decode."""


class Guard(Struct, frozen=True, kw_only=True):
    """Decides for one model and one limit; every answer follows from its arguments alone."""

    tables: CallTables
    limit_bytes: int
    prompt_concurrency: int = 8
    decode_concurrency: int = 32
    prefill_step: int = 2048

    def __post_init__(self) -> None:
        """Reject settings out of range."""
        require_counts(
            limit=self.limit_bytes,
            prefill_step=self.prefill_step,
            prompt_concurrency=self.prompt_concurrency,
            decode_concurrency=self.decode_concurrency,
        )
        if self.limit_bytes < self.tables.weights_bytes:
            raise InputError(
                f"a limit of {self.limit_bytes} bytes is below the weights of {self.tables.model},"
                f" {self.tables.weights_bytes}"
            )
        if not 1 <= self.prefill_step <= LONGEST_STEP:
            raise InputError(
                f"prefill step {self.prefill_step}: give one from 1 to {LONGEST_STEP} tokens"
            )
        if (
            not 1
            <= min(self.prompt_concurrency, self.decode_concurrency)
            <= self.most_rows
            <= MOST_ROWS
        ):
            raise InputError(
                f"{self.prompt_concurrency} prompts and {self.decode_concurrency} replies together:"
                f" give from 1 to {MOST_ROWS} of each"
            )

    @property
    def most_rows(self) -> int:
        """Requests that run together (BatchGenerator, completion_batch_size)."""
        return max(self.prompt_concurrency, self.decode_concurrency)

    def preflight(self, prompt_tokens: int, max_tokens: int) -> Admit | Refuse:
        """Return whether a request fits on the empty server."""
        decision = self.admit(Request(prompt_tokens, max_tokens), State(step=self.prefill_step))
        assert isinstance(decision, (Admit, Refuse))
        return decision

    def admit(self, request: Request, state: State) -> Decision:
        """Return whether a request may start now beside what runs and is stored.

        Raises:
            InputError: for rows beyond the tables of the model.
        """
        longest = request.cached + request.new + request.max_tokens
        if longest > self.tables.max_tokens:
            most = self.tables.max_tokens - request.cached - request.max_tokens
            return Refuse("more tokens than the model or its card has", max(0, most))
        row = Row(request.cached, request.new, request.max_tokens)
        running = (*state.prefilling, *state.decoding)
        if len(state.prefilling) >= self.prompt_concurrency or len(running) >= self.most_rows:
            return self._refused(row, state) or _waiting(0, running)
        pinned = sum(entry.nbytes for entry in state.entries if entry.is_pinned)
        stored = sum(entry.nbytes for entry in state.entries)
        after = replace(state, prefilling=(*state.prefilling, row), entries=())
        least: int | None = None
        for step in self._steps(state):
            needed = self._needed(after, step)
            if needed + stored <= self.limit_bytes:
                return Admit(step, needed + stored, longest)
            least = needed if least is None else min(least, needed)
        assert least is not None
        if least + pinned <= self.limit_bytes:
            return _evicted(state.entries, least + stored - self.limit_bytes)
        return self._refused(row, state) or _waiting(least + pinned - self.limit_bytes, running)

    def chunk(self, tokens: int, keys: int, state: State) -> int:
        """Return how many of ``tokens`` the next chunk may have; 0: none until something ends.

        It is of each row of ``state.prefilling``, or of one row, with ``keys`` before it. This is
        for servers that ask before every call; what `admit` admitted needs no such question.

        Raises:
            InputError: when the row has as many keys as the model or its card takes tokens.
        """
        require_counts(tokens=tokens, keys=keys)
        if keys >= self.tables.max_tokens:
            raise InputError(f"keys {keys}: {self.tables.model} ends at {self.tables.max_tokens}")
        rows = max(1, len(state.prefilling))
        widest = max((row.tokens for row in state.decoding), default=0)
        decoding = len(state.decoding) * self.tables.row_bytes(widest)
        held = self.held_bytes(state) - state.prompt_bytes
        held += max(0, decoding - state.decode_bytes)
        held += self.tables.logits_bytes(len(state.decoding))
        for size in (tokens, *(step for step in STEPS if step < tokens), 32, 1):
            if size > min(tokens, LONGEST_STEP) or keys + size > self.tables.max_tokens:
                continue
            caches = rows * self.tables.row_bytes(keys + size + STEP, size)
            call = self.tables.chunk_bytes(rows, size, keys + size)
            if held + max(state.prompt_bytes, caches) + call <= self.limit_bytes:
                return size
        return 0

    def store(self, tokens: int, state: State) -> bool:
        """Return whether a finished cache of so many tokens may be kept beside what runs.

        Its row is not among those of ``state`` any more, and its bytes still in the buffers.
        """
        require_counts(tokens=tokens)
        entry = self.entry_bytes(tokens)
        later = self.peak_bytes(state)
        return max(later, self.held_bytes(state)) + entry <= self.limit_bytes

    def entry_bytes(self, tokens: int) -> int:
        """Return the bytes of a stored cache of a row (BatchRotatingKVCache.extract)."""
        return self.tables.row_bytes(tokens, self.prefill_step)

    def held_bytes(self, state: State) -> int:
        """Return what is in memory between two calls, to compare with MLX's active memory."""
        entries = sum(entry.nbytes for entry in state.entries)
        held = self.tables.weights_bytes + state.other_bytes + entries
        return held + state.decode_bytes + state.prompt_bytes

    def peak_bytes(self, state: State) -> int:
        """Return the most that can be in memory from now on if nothing else is admitted."""
        return self._needed(state, state.step) + sum(entry.nbytes for entry in state.entries)

    def _steps(self, state: State) -> list[int]:
        return [state.step, *(step for step in STEPS if step < state.step)]

    def _refused(self, row: Row, state: State) -> Refuse | None:
        """Return why a row does not fit even alone, None where it does."""
        empty = State(step=self.prefill_step, other_bytes=state.other_bytes)
        if self._fits_alone(row, empty):
            return None
        low, high = 0, row.prompt
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._fits_alone(replace(row, prompt=middle), empty)
            low, high = (middle, high) if fits else (low, middle - 1)
        return Refuse("it does not fit beside the weights on the empty server", low)

    def _fits_alone(self, row: Row, empty: State) -> bool:
        alone = replace(empty, prefilling=(row,))
        return any(self._needed(alone, each) <= self.limit_bytes for each in self._steps(empty))

    def _needed(self, state: State, step: int) -> int:
        """Return the most of all calls to come without the stored entries."""
        runs = [_Run(-1, row.reply + 1, row.tokens, row.tokens - 1) for row in state.decoding]
        prompts = [
            _Run(
                calls := ceil_div(max(0, row.prompt - 1), step),
                calls + row.reply + 2,
                row.tokens,
                row.tokens + max(0, row.prompt - 1),
            )
            for row in state.prefilling
        ]
        most = max(self._calls(runs, prompts, state, step), default=0)
        before = state.decode_bytes + state.prompt_bytes
        return self.tables.weights_bytes + state.other_bytes + max(before, most)

    def _calls(
        self, runs: Sequence[_Run], prompts: Sequence[_Run], state: State, step: int
    ) -> list[int]:
        """Return what the calls take in which the most is in memory: the last before a change."""
        prefill = _Prefill(prompts, step)
        decode = _Decode((*runs, *prompts))
        calls = {-1, 0}
        for run in (*runs, *prompts):
            # The last whole chunk, what is left of the prompt, the first token and the last.
            calls |= {max(-1, run.start - behind) for behind in (2, 1, 0)} | {run.end}
        return [
            self._call(decode.at(call), prefill.at(call), state, step, is_first=call <= 0)
            for call in sorted(calls)
        ]

    def _call(
        self,
        decode: tuple[int, int],
        prefill: tuple[int, int, int],
        state: State,
        step: int,
        *,
        is_first: bool,
    ) -> int:
        tables = self.tables
        (rows, width), (prompts, chunk, wide) = decode, prefill
        is_shared = len(state.decoding) + len(state.prefilling) > 1 or state.decode_bytes > 0
        size = partial(tables.row_bytes, fills_windows=is_shared)
        caches = rows * size(width, step if prompts else 1) if rows else 0
        of_prompts = prompts * size(wide, step) if prompts else 0
        if is_first:
            caches, of_prompts = (
                max(caches, state.decode_bytes),
                max(of_prompts, state.prompt_bytes),
            )
        call = tables.step_bytes(rows, width)
        if chunk:
            call = max(call, tables.chunk_bytes(prompts, chunk, wide))
        return caches + of_prompts + call + tables.logits_bytes(rows)


class _Prefill:
    """The batch of prompts in each call of the replay, once those that are ready have left it.

    What it holds before they leave, it held after the call before; the batch that they leave for
    is a copy of as many bytes at most, computed layer by layer.
    """

    def __init__(self, prompts: Sequence[_Run], step: int) -> None:
        self._step = step
        ordered = sorted(prompts, key=attrgetter("start"))
        self._starts = [run.start for run in ordered]
        self._suffix = [(0, 0, 0)]
        for run in reversed(ordered):
            goal, tokens, left = self._suffix[-1]
            new = run.goal - run.tokens
            self._suffix.append((max(goal, run.goal), max(tokens, run.tokens), max(left, new)))
        self._suffix.reverse()

    def at(self, call: int) -> tuple[int, int, int]:
        """Return its rows, the tokens of its chunk and its width; call -1 is before the first."""
        first = bisect_right(self._starts, call)
        rows = len(self._starts) - first
        if not rows:
            return 0, 0, 0
        goal, tokens, left = self._suffix[first]
        done = max(0, call) * self._step
        chunk = min(self._step, left - done) if call >= 0 else 0
        # A row that ends with a shorter chunk is padded to that of the longest; a step of room for
        # what is left of a buffer that rows have left (BatchKVCache.filter).
        return rows, chunk, min(goal, tokens + done) + chunk + STEP


class _Decode:
    """The decoding batch in each call of the replay; calls are looked up in ascending order."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._ordered = sorted(runs, key=attrgetter("start"))
        self._starts = [run.start for run in self._ordered]
        self._ends = sorted(run.end for run in runs)
        self._widest: list[tuple[int, int]] = []
        self._next = 0

    def at(self, call: int) -> tuple[int, int]:
        """Return its rows and its width: all are as wide as the widest."""
        while self._next < len(self._ordered) and self._starts[self._next] <= call:
            run = self._ordered[self._next]
            heappush(self._widest, (run.start - run.goal, run.end))
            self._next += 1
        while self._widest and self._widest[0][1] < call:
            heappop(self._widest)
        if not self._widest:
            return 0, 0
        rows = bisect_right(self._starts, call) - bisect_left(self._ends, call)
        return rows, call + 2 - self._widest[0][0] + STEP


def _waiting(excess_bytes: int, running: Sequence[Row]) -> Wait:
    widest = max(running, key=_final_width, default=Row(0, 0, 0))
    return Wait(excess_bytes, widest.id, _final_width(widest))


def _final_width(row: Row) -> int:
    return row.tokens + row.prompt + row.reply


def _evicted(entries: Sequence[Entry], excess: int) -> Evict:
    """Return the entries that were used the longest ago, without those not needed in the end."""
    chosen: list[Entry] = []
    for entry in sorted((each for each in entries if not each.is_pinned), key=attrgetter("used")):
        if excess <= 0:
            break
        chosen.append(entry)
        excess -= entry.nbytes
    for entry in sorted(chosen, key=attrgetter("used"), reverse=True):
        if excess + entry.nbytes <= 0:
            chosen.remove(entry)
            excess += entry.nbytes
    return Evict(tuple(entry.id for entry in chosen), sum(entry.nbytes for entry in chosen))
