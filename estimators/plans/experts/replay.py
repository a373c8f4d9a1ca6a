"""Replay recorded routing with any number of slots: what each policy misses and reads."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from math import floor
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import ceil_div
from memfit.estimators.plans.experts.recording import Recording
from memfit.estimators.plans.experts.routing import (
    ChosenSlots,
    RoutingProfile,
    adaptive_capacities,
    chosen_slots,
)
from memfit.estimators.plans.experts.slot_table import LcpTable, SlotTable, SwapTables
from memfit.estimators.results.experts import ExpertsPlan, ReplayedCapacity, ReplayPolicy
from memfit.estimators.weights.expert_slots import ExpertLayer

_MOST_SINGLE, _STEP = 64, 8


class Choices(NamedTuple):
    """What one layer chose in one call."""

    wanted: list[int]
    """The experts, each once, in their order."""
    uses: Counter[int]
    """How many tokens use each."""


class Call(NamedTuple):
    tokens: int
    is_counted: bool
    starts_run: bool
    layers: tuple[Choices, ...]


class Replayed(NamedTuple):
    """What the counted calls of a single token, which decode, missed and read."""

    tokens: int
    uses: int
    misses: int
    reads: int
    read_bytes: int


class Replay:
    """Recorded routing, prepared once for all capacities and policies."""

    def __init__(
        self, profile: RoutingProfile, recording: Recording, layers: Sequence[ExpertLayer]
    ) -> None:
        self._profile, self._layers = profile, layers
        runs = [list(run.steps(recording.top_k)) for run in recording.runs]
        prepared = [
            [(tokens, tuple(map(_choices, choices))) for tokens, choices in run] for run in runs
        ]
        self._calls = [
            Call(tokens, place >= recording.warm_up, number == 0, choices)
            for place, run in enumerate(recording.order)
            for number, (tokens, choices) in enumerate(prepared[run])
        ]

    def at(self, policy: ReplayPolicy, capacity: int) -> Replayed:
        """Return what a policy does with a number of slots in each layer.

        ``adaptive`` divides as many bytes between the layers by their use.
        """
        return self.of(policy, self._slots(policy, capacity))

    def of(self, policy: ReplayPolicy, slots: Sequence[ChosenSlots]) -> Replayed:
        """Return what a policy does when it begins with these experts in the slots."""
        missed = _POLICIES[policy](self._calls, slots)
        tokens = uses = misses = reads = nbytes = 0
        for call, found in zip(self._calls, missed, strict=True):
            if not call.is_counted or call.tokens > 1:
                continue
            tokens += call.tokens
            for layer, own, (missing, read), kept in zip(
                self._layers, call.layers, found, slots, strict=True
            ):
                if len(kept.kept) < layer.experts:  # with every expert nothing is counted
                    uses += own.uses.total()
                misses, reads = misses + missing, reads + read
                nbytes += read * layer.slot_bytes
        return Replayed(tokens, uses, misses, reads, nbytes)

    def _slots(self, policy: ReplayPolicy, capacity: int) -> tuple[ChosenSlots, ...]:
        if policy != "adaptive":
            return chosen_slots(self._profile, capacity, self._layers)
        budget = capacity * sum(layer.slot_bytes for layer in self._layers)
        capacities = adaptive_capacities(self._profile, self._layers, budget)
        return chosen_slots(self._profile, capacities, self._layers)


def replayed_plan(
    plan: ExpertsPlan,
    replay: Replay,
    *,
    decode: Fraction | None,
    disk: int | None,
    wanted: int | None,
) -> ExpertsPlan:
    """Return a plan with every policy at every capacity, and the least that is fast enough.

    ``decode`` are tokens per second with all experts in memory, ``disk`` bytes per second,
    ``wanted`` tokens per second.

    Raises:
        InputError: when a speed is wanted, and one of the other two is not known.
    """
    if wanted and (decode is None or disk is None):
        raise InputError(
            f"{setting('speed')} needs {setting('bandwidth')}, and with {setting('device')} a chip"
            " whose memory bandwidth is known"
        )
    rows = [
        _row(replay.at(policy, capacity), capacity, policy, decode, disk)
        for capacity in _capacities(plan)
        for policy in _POLICIES
    ]
    least = (
        UNSET
        if not wanted
        else {
            policy: next(
                (
                    row.capacity
                    for row in rows
                    if row.policy == policy and (row.tokens_per_second or 0) >= wanted
                ),
                None,
            )
            for policy in _POLICIES
        }
    )
    return replace(
        plan, replayed=tuple(rows), wanted_tokens_per_second=wanted, least_capacities=least
    )


def _capacities(plan: ExpertsPlan) -> list[int]:
    """Every number of experts, of many the multiples of 8 that mlx-moe takes, and those shown."""
    step = 1 if plan.experts <= _MOST_SINGLE else _STEP
    shown = {row.capacity for row in plan.rows if row.capacity >= plan.top_k}
    every = range(-(-plan.top_k // step) * step, plan.experts + 1, step)
    return sorted({*every, *shown, plan.experts})


def _row(
    found: Replayed, capacity: int, policy: ReplayPolicy, decode: Fraction | None, disk: int | None
) -> ReplayedCapacity:
    tokens = max(1, found.tokens)
    nbytes = ceil_div(found.read_bytes, tokens)
    speed = None
    if decode and disk is not None:
        seconds = 1 / decode + Fraction(found.read_bytes, tokens * disk)
        speed = floor(10 / seconds) / 10
    return ReplayedCapacity(
        capacity=capacity,
        policy=policy,
        misses_per_token=round(found.misses / tokens, 3),
        reads_per_token=round(found.reads / tokens, 3),
        read_bytes_per_token=nbytes,
        disk_microseconds_per_token=ceil_div(nbytes * 10**6, disk) if disk else None,
        tokens_per_second=speed,
    )


Missed = Iterator[list[tuple[int, int]]]
"""For each call, how many uses each layer missed, and how many experts were read for it."""


def _choices(chosen: Sequence[int]) -> Choices:
    uses = Counter(chosen)
    return Choices(sorted(uses), uses)


def _static(calls: Sequence[Call], slots: Sequence[ChosenSlots]) -> Missed:
    """The slots never change: ``--policy skip``."""
    kept = [frozenset(each.kept) for each in slots]
    for call in calls:
        yield [
            (sum(own.uses[expert] for expert in own.wanted if expert not in there), 0)
            for own, there in zip(call.layers, kept, strict=True)
        ]


def _longest_ago(
    calls: Sequence[Call], slots: Sequence[ChosenSlots], *, keeps_pinned: bool
) -> Missed:
    """A missing expert is read into the slot used longest ago: ``--policy load``, which pins."""
    tables = [SlotTable(each.kept, each.pinned if keeps_pinned else ()) for each in slots]
    for call in calls:
        found = []
        for table, own in zip(tables, call.layers, strict=True):
            missed = sum(own.uses[expert] for expert in table.missing(own.wanted))
            reads = sum(len(table.place(group)) for group in list(table.groups(own.wanted)))
            found.append((missed, reads))
        yield found


def _swapped(calls: Sequence[Call], slots: Sequence[ChosenSlots]) -> Missed:
    """A missing expert is skipped, and read between tokens: ``--policy swap``, as mlx-moe."""
    tables = [LcpTable(each.kept, each.pinned) for each in slots]
    swaps, pending = SwapTables(tables), list[Call]()
    for call in calls:
        if call.starts_run:
            swaps.restart()
            pending.clear()
        reads = [0] * len(tables)
        if swaps.is_due():
            done, pending = pending[:-1], pending[-1:]
            requested = [
                {expert for each in done for expert in each.layers[index].wanted}
                for index in range(len(tables))
            ]
            reads = list(map(len, swaps.update(requested)))
        yield [
            (sum(own.uses[expert] for expert in table.missing(own.wanted)), read)
            for table, own, read in zip(tables, call.layers, reads, strict=True)
        ]
        swaps.called(call.tokens)
        pending.append(call)


_POLICIES: dict[ReplayPolicy, Callable[[Sequence[Call], Sequence[ChosenSlots]], Missed]] = {
    "static": _static,
    "lru": partial(_longest_ago, keeps_pinned=False),
    "pinned": partial(_longest_ago, keeps_pinned=True),
    "swap": _swapped,
    "adaptive": _swapped,
}
