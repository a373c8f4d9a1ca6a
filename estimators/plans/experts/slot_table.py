"""Which expert is in which slot, by two policies; `memfit tune experts` and replays both use it.

`SlotTable` reads what is missing into the slot that was used longest ago. `SwapTables` is mlx-moe:
a missing expert is skipped, and between tokens cold experts are replaced.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

SWAPS_PER_LAYER = 10
"""Experts that mlx-moe replaces in a layer at once (mlx_moe/lazy_experts/modules.py, MAX_SWAPS)."""
LAYERS_PER_STEP = 48
"""Layers in which it replaces any between two tokens (mlx_moe/server.py, max_layer_updates)."""

Placed = list[tuple[int, int]]
"""Experts to read, each with its slot."""


def lcp_priority(frequency: int, age: int) -> float:
    """Return the priority of an expert in mlx-moe, which replaces the lowest one.

    ``age`` is the number of updates since its last use. It only orders experts, as a float there
    too. Source: mlx_moe/lazy_experts/modules.py, PredictiveExpertCache._lcp_priority.

    >>> lcp_priority(8, 0), lcp_priority(8, 128)
    (8.0, 2.0)
    """
    return frequency * float(0.25 ** (age / 128))


class SlotTable:
    """The slots of one layer; the expert that was used longest ago leaves first."""

    def __init__(self, kept: Sequence[int], pinned: Iterable[int] = ()) -> None:
        """Take the experts in the order of their slots; a pinned one never leaves."""
        self.capacity = len(kept)
        # The expert that was used longest ago is first.
        self.slot_of = {expert: slot for slot, expert in enumerate(kept)}
        self.pinned = frozenset(pinned)

    def missing(self, chosen: Iterable[int]) -> list[int]:
        """Return the chosen experts without a slot."""
        return [expert for expert in chosen if expert not in self.slot_of]

    def touch(self, chosen: Iterable[int]) -> None:
        """Take note that experts were used now."""
        for expert in chosen:
            self.slot_of[expert] = self.slot_of.pop(expert)

    def groups(self, wanted: list[int]) -> Iterator[list[int]]:
        """Yield experts that fit the slots at the same time, those in slots first."""
        room = self.capacity - len(self.pinned.difference(wanted))
        if len(wanted) <= room:
            yield wanted
            return
        present = [expert for expert in wanted if expert in self.slot_of]
        missing = self.missing(wanted)
        if present:
            yield present
        each = self.capacity - len(self.pinned)
        yield from (missing[at : at + each] for at in range(0, len(missing), each))

    def place(self, wanted: Sequence[int]) -> Placed:
        """Give the experts without a slot the slots used longest ago; return what to read."""
        missing = self.missing(wanted)
        self.touch(expert for expert in wanted if expert in self.slot_of)
        stay = self.pinned.union(wanted)
        leaving = [expert for expert in self.slot_of if expert not in stay] if missing else []
        placed = []
        for expert, leaves_now in zip(missing, leaving, strict=False):
            slot = self.slot_of[expert] = self.slot_of.pop(leaves_now)
            placed.append((expert, slot))
        return placed


class LcpTable(SlotTable):
    """The slots of one layer of mlx-moe (PredictiveExpertCache of its modules.py)."""

    def __init__(self, kept: Sequence[int], pinned: Iterable[int] = ()) -> None:
        super().__init__(kept, pinned)
        self._frequency = dict.fromkeys(kept, 1)
        self._last_active = dict.fromkeys(kept, 0)
        self._step = 0

    def count(self, requested: Collection[int]) -> None:
        """Count experts that the tokens since the last update requested."""
        self._step += 1
        for expert in requested:
            self._frequency[expert] = self._frequency.get(expert, 0) + 1
            self._last_active[expert] = self._step

    def swap(self, requested: Collection[int]) -> Placed:
        """Replace the coldest experts by those that were missing; return what to read."""
        missing = sorted(self.missing(requested))
        if not missing:
            return []
        cold = sorted(
            (self._priority(expert), slot, expert)
            for expert, slot in self.slot_of.items()
            if expert not in requested and expert not in self.pinned
        )
        placed = []
        for expert, (_, slot, old) in zip(missing[:SWAPS_PER_LAYER], cold, strict=False):
            del self.slot_of[old]
            self._frequency.pop(old, None)
            self._last_active.pop(old, None)
            self.slot_of[expert] = slot
            placed.append((expert, slot))
        return placed

    def _priority(self, expert: int) -> float:
        age = self._step - self._last_active.get(expert, 0)
        return lcp_priority(self._frequency.get(expert, 0), age)


class SwapTables:
    """All layers of mlx-moe, with what their routers chose since the last update.

    mlx-moe updates between two tokens, when the call of the next one is under way, whose choices
    it leaves for the update after (core.py, dynamic_cache_update). The first token is the call of
    the prompt's last one, so that the first update is after the second call of a single token.
    """

    def __init__(self, tables: Sequence[LcpTable]) -> None:
        self.tables = tables
        self._singles = 0
        self._pending = 0

    def is_due(self) -> bool:
        """Return whether an update comes before the next call."""
        return self._singles > 1 and self._pending > 1

    def called(self, tokens: int) -> None:
        """Take note of a call with this number of tokens."""
        self._singles = self._singles + 1 if tokens == 1 else 0
        self._pending += 1

    def restart(self) -> None:
        """Forget the calls of a run that has ended."""
        self._singles = self._pending = 0

    def update(self, requested: Sequence[Collection[int]]) -> list[Placed]:
        """Replace experts after calls whose choices are done; return what each layer reads."""
        self._pending = 1
        left, placed = LAYERS_PER_STEP, []
        for table, experts in zip(self.tables, requested, strict=True):
            table.count(experts)
            placed.append(table.swap(experts) if left else [])
            left -= bool(placed[-1])
        return placed
