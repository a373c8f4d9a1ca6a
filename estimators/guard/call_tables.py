"""What calls of mlx-lm's batch generator take, in bytes: from a memory card, or from a model.

Nothing falls with more rows, tokens of a call or keys: a guard's proof needs that (guard.py). Sizes
between two of a grid get the larger one's figure, and what is stated as the error of a figure is
added to it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from msgspec import to_builtins
from msgspec.structs import replace

from memfit.estimators.arch.specs import STEP
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import ceil_div, round_up
from memfit.estimators.base.workload import ALL_PHASES, Workload
from memfit.estimators.guard.evaluators.memory_card import lookup
from memfit.estimators.guard.tabulate import card_facts
from memfit.estimators.mlx.call_plan import CHUNKS, decoded_alone
from memfit.estimators.mlx.kv_cache import BatchBuffer
from memfit.estimators.results.card import MemoryCard
from memfit.estimators.sizing.server_bound import ServerMemory, one_at_a_time
from memfit.estimators.sizing.sized_model import SizedModel, for_phases, workspace_error_of

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
_TOKENS = (1, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_ROWS = _ROWS[-1]
LONGEST_STEP = _TOKENS[-1]
_MOST = 2**20
"""Tokens of a request, where the model states no context."""


class _Calls(Protocol):
    """What single calls take beside their caches, with the stated error."""

    def without_error(self) -> "_Calls":
        """Return the same without that error."""

    def chunk(self, rows: int, tokens: int, keys: int) -> int:
        """Return the bytes of a chunk of ``tokens`` of each row, which ends at ``keys``."""

    def step(self, rows: int, keys: int) -> int:
        """Return the bytes of a decode step."""

    def logits(self, rows: int) -> int:
        """Return the bytes that rows keep between two decode steps."""


class CallTables:
    """Bytes of weights, caches and calls; each figure is computed when it is first needed."""

    def __init__(self, card: MemoryCard, calls: _Calls) -> None:
        """Take the rules of the caches from a card, whose tables are not read, and the calls."""
        self._card = card
        self.model, self.max_tokens = card.model, card.max_tokens
        self.weights_bytes, self.load_bytes = card.weights_bytes, card.load_bytes
        self.windows = tuple(limit for limit, _ in card.caches if limit)
        self.has_states = bool(card.state_bytes)
        self._state_bytes = card.state_bytes
        self._views = card.view_bytes, card.decode_view_bytes
        self._per_token = sum(own for limit, own in card.caches if not limit)
        self._of_windows = tuple((limit, own) for limit, own in card.caches if limit)
        self._calls = calls
        self._keys = tuple(_key_grid(card.max_tokens))
        self._known: dict[tuple[int, int, int], int] = {}
        self.logits_bytes = calls.logits

    def without_error(self) -> "CallTables":
        """Return the figures themselves, to which their stated error is not added."""
        return CallTables(self._card, self._calls.without_error())

    def row_bytes(self, width: int, chunk: int = 1, *, fills_windows: bool = False) -> int:
        """Return the bytes of a row of a batch that is ``width`` tokens wide.

        A window is as wide, or where it ``fills_windows`` whole: it keeps the padding of rows that
        left the batch (cache.py, BatchRotatingKVCache.filter).

        After chunks of a length a window is longer by as many tokens, and states are slices of as
        many (cache.py, RotatingKVCache._update_concat).
        """
        view = self._views[1] if chunk == 1 else max(self._views)
        windows = (
            own * (limit - 1 + chunk if fills_windows else min(width, limit - 1 + chunk))
            for limit, own in self._of_windows
        )
        return self._state_bytes + view * chunk + self._per_token * width + sum(windows)

    def buffer_bytes(self, buffer: BatchBuffer) -> int:
        """Return the bytes of the caches of a batch as they are."""
        rooms = dict(buffer.windows)
        one = self._state_bytes + self._views[0] * buffer.viewed + self._per_token * buffer.capacity
        return buffer.rows * (one + sum(own * rooms[limit] for limit, own in self._of_windows))

    def chunk_bytes(self, rows: int, tokens: int, keys: int) -> int:
        """Return the most that a chunk of up to this size takes beside its caches.

        Raises:
            InputError: beyond the tables.
        """
        return self._most(rows, tokens, keys) if rows else 0

    def step_bytes(self, rows: int, keys: int) -> int:
        """Return the most that a decode step of up to this size takes beside its caches.

        Raises:
            InputError: beyond the tables.
        """
        return self._most(rows, 1, keys) if rows else 0

    def _most(self, rows: int, tokens: int, keys: int) -> int:
        place = (
            bisect_left(_ROWS, rows),
            bisect_left(_TOKENS, tokens),
            bisect_left(self._keys, keys),
        )
        if place not in self._known:
            if any(map(_is_beyond, place, (_ROWS, _TOKENS, self._keys))):
                raise InputError(
                    f"{rows} rows, {tokens} tokens, {keys} keys: beyond the tables of {self.model}"
                )
            self._close(*place)
        return self._known[place]

    def _close(self, rows: int, tokens: int, keys: int) -> None:
        """Compute the figures of all smaller sizes, and let each be no less than theirs."""
        lowest = min(1, tokens)  # a decode step is no chunk, and has figures of its own
        for row in range(rows + 1):
            for token in range(lowest, tokens + 1):
                for key in range(keys + 1):
                    if (row, token, key) not in self._known:
                        self._known[row, token, key] = self._figure(row, token, key, lowest)

    def _figure(self, row: int, token: int, key: int, lowest: int) -> int:
        keys = self._keys[key]
        if token:
            own = self._calls.chunk(_ROWS[row], min(_TOKENS[token], keys), keys)
        else:
            own = self._calls.step(_ROWS[row], keys)
        before = (
            self._known[row - 1, token, key] if row else 0,
            self._known[row, token - 1, key] if token > lowest else 0,
            self._known[row, token, key - 1] if key else 0,
        )
        return max(own, *before)


def _is_beyond(place: int, grid: Sequence[int]) -> bool:
    return place >= len(grid)


def _key_grid(most: int) -> list[int]:
    """Return lengths of about a fifth more than the one before, all but the last whole steps."""
    keys = [STEP]
    while keys[-1] < most:
        keys.append(round_up(keys[-1] + max(STEP, keys[-1] // 5), STEP))
    # A batch is wider than its longest row while another's chunk pads it.
    return [*keys, round_up(most, STEP) + 2 * LONGEST_STEP]


class _OfCard:
    """Calls of a batch from the tables of one sequence: as many times as it has rows."""

    def __init__(self, card: MemoryCard, *, with_error: bool = True) -> None:
        self._card, self._percent = card, 100 + card.check.error_percent * with_error
        plain = to_builtins(card)
        self._rows = plain["rows"]
        self._decode = plain["decode"], plain["growing"]
        # Rows of fewer tokens do not take more for each token and key.
        self._scores = tuple(accumulate((row.scores for row in card.rows), max))
        # create_causal_mask (mlx-lm models/base.py) makes a byte for each token and key of a row
        # from another; a model with windows makes both of its masks.
        self._mask = 4 if any(limit for limit, _ in card.caches) else 2

    def without_error(self) -> "_OfCard":
        return _OfCard(self._card, with_error=False)

    def chunk(self, rows: int, tokens: int, keys: int) -> int:
        number = bisect_left([row[0] for row in self._rows], tokens)
        keys = min(keys, self._card.max_tokens)
        units = max(lookup(knots, keys) for knots in self._rows[number][2:])
        cells = (self._scores[number] + self._mask) * tokens * keys
        return self._with_error(rows * (max(0, units) * self._card.unit + cells))

    def step(self, rows: int, keys: int) -> int:
        keys = min(keys, self._card.max_tokens)
        units = max(lookup(knots, keys) for knots in self._decode)
        return self._with_error(rows * max(0, units) * self._card.unit)

    def logits(self, rows: int) -> int:
        return 2 * rows * self._card.logits_bytes

    def _with_error(self, nbytes: int) -> int:
        return ceil_div(nbytes * self._percent, 100)


class _OfModel:
    """Calls of a batch from the figures of batches."""

    def __init__(self, memory: ServerMemory, *, with_error: bool = True) -> None:
        self._memory, self._with_error = memory, with_error
        self._steps = for_phases(memory.sized, ALL_PHASES - CHUNKS)

    def without_error(self) -> "_OfModel":
        return _OfModel(self._memory, with_error=False)

    def chunk(self, rows: int, tokens: int, keys: int) -> int:
        nbytes, error = self._memory.prefill(rows, keys, tokens)
        empty = BatchBuffer(rows, tuple((limit, 0) for limit in sorted(self._memory.windows)))
        counted = self._memory.cache_bytes(empty.grown(keys, tokens))
        return max(0, nbytes - counted) + error * self._with_error

    def step(self, rows: int, keys: int) -> int:
        # One token more than whole steps: the caches of one layer at a time are copied.
        workload = decoded_alone(Workload(prompt_tokens=1), rows, keys + 1)
        figures = self._steps.figures_for(workload)
        held = self._memory.sized.resident_bytes + figures.kv.nbytes + figures.ssm_bytes
        most = figures.moment.decode_bytes or figures.moment.nbytes
        error = workspace_error_of(self._steps, workload) if self._with_error else 0
        return max(0, most - held) + error

    def logits(self, rows: int) -> int:
        return self._memory.logits_bytes(rows, prefilling=True)


def card_tables(card: MemoryCard) -> CallTables:
    """Return the tables of a card of one sequence, for batches of such."""
    return CallTables(card, _OfCard(card))


def model_tables(sized: SizedModel) -> CallTables:
    """Return the tables of a model under mlx-lm.

    Raises:
        UnsupportedError: when the server cannot batch its requests.
    """
    if reason := one_at_a_time(sized, Workload(prompt_tokens=1)):
        raise UnsupportedError(f"{sized.checkpoint.id}: a guard is of batches, and {reason}")
    facts = replace(card_facts(sized), max_tokens=min(sized.model.max_context or _MOST, _MOST))
    return CallTables(facts, _OfModel(ServerMemory(sized, Workload(prompt_tokens=1))))
