"""``memfit plan growth``: sessions that grow token by token, under the rule of each runtime.

A cache that is copied to grow exists twice during the copy; sessions grow one at a time.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import ceil_div, round_down
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.growth import (
    Crossing,
    GrowthPlan,
    GrowthRow,
    Sessions,
    Turn,
    UnsupportedRuntime,
)
from memfit.estimators.runtimes.facets import Cache, context_limit, pool
from memfit.estimators.runtimes.growth import GrowthEvent, GrowthRule, growth_events, rule_of
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.runtime import Runtime, recommended_bytes
from memfit.estimators.runtimes.token_cost import TokenCost
from memfit.estimators.sizing.estimate import limit_notes
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime


def plan_growth(
    sized: SizedModel,
    sessions: Sessions,
    runtimes: Sequence[Runtime],
    *,
    budget_bytes: int | None = None,
    context: int | None = None,
) -> GrowthPlan:
    """Return how sessions grow under each runtime.

    Without ``budget_bytes`` caches have what each runtime leaves them of the model's device.
    ``context`` is the capacity of a contiguous cache, by default the length of a session.

    Raises:
        InputError: when the sessions are longer than that context.
    """
    if context is not None and sessions.tokens > context:
        raise InputError(f"sessions of {sessions.tokens} tokens exceed the context of {context}")
    found: dict[_Growing, list[Runtime]] = {}
    undecided = []
    for runtime in runtimes:
        try:
            under = with_runtime(sized, runtime)
            growing = _growing(under, sessions, budget_bytes, context)
        except UnsupportedError as error:
            undecided.append(UnsupportedRuntime(runtime.name, str(error)))
            continue
        found.setdefault(growing, []).append(under.runtime_model.runtime)
    budgets = {growing.budget_bytes for growing in found}
    return GrowthPlan(
        model=sized.checkpoint.id,
        sessions=sessions,
        tokens=sessions.tokens,
        budget_bytes=budgets.pop() if len(budgets) == 1 else None,
        runtimes=tuple(runtime_summary(one) for alike in found.values() for one in alike),
        rules=tuple(
            growing.answer(tuple(one.name for one in alike)) for growing, alike in found.items()
        ),
        undecided=tuple(undecided),
        notes=tuple(limit_notes(sized.model.max_context, sessions.tokens)),
    )


def _growing(
    sized: SizedModel, sessions: Sessions, budget_bytes: int | None, context: int | None
) -> "_Growing":
    model, runtime = sized.model, sized.runtime_model.runtime
    limit = context_limit(sized.runtime_model)
    if limit is not None and sessions.tokens > limit:
        raise UnsupportedError(f"{runtime.name} stops at {limit} tokens")
    run, costs = _workload(sessions, runtime), sized.runtime_model.facet(Cache)
    if budget_bytes is None:
        budget_bytes = _cache_budget_bytes(sized, run)
    own = sessions.tokens if runtime.growth == "contiguous" else model.max_context
    return _Growing(
        sessions,
        rule_of(runtime, most=context or own),
        costs.token_costs(run) if costs else (),
        runtime.shares_prefix,
        budget_bytes,
    )


def _cache_budget_bytes(sized: SizedModel, workload: Workload) -> int | None:
    """Return what caches may take of the device: without a pool, all but the weights.

    None without a device.
    """
    device, budget = sized.device, sized.runtime_model.runtime.budget
    if device is None:
        return None
    if pooled := pool(sized.runtime_model, workload):
        return pooled.pool_bytes
    left = max(0, recommended_bytes(budget, device) - sized.resident_bytes)
    return min(left, budget.of_device(device)) if budget.for_cache else left


class _Growing(Struct, frozen=True):
    sessions: Sessions
    rule: GrowthRule
    kept: tuple[TokenCost, ...]
    shares: bool
    budget_bytes: int | None

    def answer(self, names: tuple[str, ...]) -> GrowthRow:
        events = list(growth_events(self.rule, self.sessions.tokens))
        turns = tuple(self._turns(events))
        last = turns[-1]
        peak = max((self._alive(event) for event in events), default=0)
        copied = sum(self._bytes(event.copied) for event in events)
        return GrowthRow(
            runtimes=names,
            growth=self.rule.kind,
            step=self.rule.step,
            bytes_per_token=sum(cost.bytes_per_token for cost in self.kept),
            allocated_bytes=last.allocated_bytes,
            held_bytes=last.held_bytes,
            peak_bytes=max(peak, last.allocated_bytes),
            growths=len(events),
            copied_bytes=copied * self.sessions.sessions,
            shared_bytes=self._shared(),
            budget_bytes=self.budget_bytes,
            crossing=self._crossing(events),
            turns=turns,
        )

    def _turns(self, events: list[GrowthEvent]) -> Iterator[Turn]:
        capacity, upcoming = 0, iter(events)
        event = next(upcoming, None)
        for turn in range(1, self.sessions.turns + 1):
            tokens = self.sessions.after(turn)
            while event and event.tokens <= tokens:
                capacity, event = event.after, next(upcoming, None)
            held = sum(cost.needed_bytes(tokens) for cost in self.kept)
            count = self.sessions.sessions
            allocated = count * self._bytes(capacity) - self._shared()
            yield Turn(turn, tokens, allocated, count * held - self._shared())

    def _alive(self, event: GrowthEvent) -> int:
        """Bytes of all sessions while the last one grows; the others have grown before."""
        others = (self.sessions.sessions - 1) * self._bytes(event.after)
        both = self._bytes(event.after)
        both += self._bytes(event.before) if self.rule.copies else 0
        # No more is shared than the other sessions have allocated so far.
        shared = min(self._shared(), others)
        return others + both - shared

    def _crossing(self, events: list[GrowthEvent]) -> Crossing | None:
        for event in events if self.budget_bytes is not None else ():
            alive = self._alive(event)
            if self.budget_bytes is not None and alive > self.budget_bytes:
                beyond = max(0, event.tokens - self.sessions.prefix_tokens)
                turn = max(1, ceil_div(beyond, self.sessions.turn_tokens))
                return Crossing(event.tokens, turn, alive)
        return None

    def _shared(self) -> int:
        """Bytes of full pages of the prefix, in every session but the first."""
        if not self.shares:
            return 0
        pages = round_down(self.sessions.prefix_tokens, self.rule.step)
        full = sum(cost.bytes_per_token * pages for cost in self.kept if cost.window is None)
        return (self.sessions.sessions - 1) * full

    def _bytes(self, tokens: int) -> int:
        return sum(cost.allocated_bytes(tokens) for cost in self.kept)


def _workload(sessions: Sessions, runtime: Runtime) -> Workload:
    """The end of a session as a workload with the settings of the runtime."""
    return Workload(
        prompt_tokens=sessions.tokens,
        prefill_step=runtime.prefill_step,
        kv_bits=runtime.kv_bits,
        kv_group_size=runtime.kv_group_size,
        quantized_kv_start=runtime.quantized_kv_start,
    )
