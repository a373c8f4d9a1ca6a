"""``memfit plan growth``: sessions that grow token by token, under each runtime's rule.

Sessions take turns: each has the shared prefix and so many turns. A cache that is copied when it
grows lives twice for that moment; sessions grow one at a time.
"""

from collections.abc import Iterator, Sequence

from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.records import record
from memfit.estimators.base.units import round_down
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import MAX_TOKENS, Workload
from memfit.estimators.runtimes.growth import GrowthEvent, GrowthRule, growth_events, rule_of
from memfit.estimators.runtimes.registry import Growth, Runtime
from memfit.estimators.runtimes.token_cost import Charge, charges

SCHEMA = "memfit.plan-growth/1"
MOST_SESSIONS = 100_000
MOST_TURNS = 100_000


@record(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Sessions alike: a prefix all of them share, and turns of so many tokens each.

    Raises:
        InputError: when a count is out of range.
    """

    sessions: int = 1
    prefix_tokens: int = 0
    turns: int = 1
    turn_tokens: int

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("sessions", self.sessions, 1, MOST_SESSIONS),
            ("turns", self.turns, 1, MOST_TURNS),
            ("prefix tokens", self.prefix_tokens, 0, MAX_TOKENS),
            ("turn tokens", self.turn_tokens, 1, MAX_TOKENS),
            ("tokens of a session", self.tokens, 1, MAX_TOKENS),
        ):
            if not least <= value <= most:
                raise InputError(f"{name} {value}: must be from {least} to {most}")

    @property
    def tokens(self) -> int:
        """Tokens of one session when its last turn ends."""
        return self.prefix_tokens + self.turns * self.turn_tokens

    def after(self, turn: int) -> int:
        """Return the tokens of a session after a turn, 1 for the first."""
        return self.prefix_tokens + turn * self.turn_tokens


@record(frozen=True, slots=True)
class Turn:
    """All sessions after a turn: the bytes that are allocated, and needed."""

    turn: int
    tokens: int
    allocated_bytes: int
    held_bytes: int


@record(frozen=True, slots=True)
class Crossing:
    """Where the caches first exceed the budget: tokens of a session, its turn, and the bytes."""

    tokens: int
    turn: int
    alive_bytes: int


@record(frozen=True, slots=True, kw_only=True)
class Grown:
    """Sessions under one rule; runtimes whose figures are equal stand together.

    ``peak_bytes`` is with old and new of one session alive. ``shared_bytes`` are pages of the
    prefix that the other sessions do without.
    """

    runtimes: tuple[str, ...]
    growth: Growth
    step: int
    bytes_per_token: int
    allocated_bytes: int
    held_bytes: int
    peak_bytes: int
    growths: int
    copied_bytes: int
    shared_bytes: int
    crossing: Crossing | None
    turns: tuple[Turn, ...]


@record(frozen=True, slots=True)
class Ungrown:
    """A runtime that cannot keep this model's cache, and why."""

    runtime: str
    reason: str


@record(frozen=True, slots=True, kw_only=True)
class GrowthPlan:
    """The answer of ``memfit plan growth``; ``budget_bytes`` is for all caches."""

    memfit_version: str
    model: str
    sessions: Sessions
    tokens: int
    budget_bytes: int | None
    rules: tuple[Grown, ...]
    undecided: tuple[Ungrown, ...]
    schema: str = SCHEMA


def plan_growth(
    model: Model,
    label: str,
    sessions: Sessions,
    runtimes: Sequence[Runtime],
    *,
    budget_bytes: int | None = None,
    context: int | None = None,
) -> GrowthPlan:
    """Return how sessions grow under each runtime.

    ``context`` is what a contiguous cache is made for, the sessions' own length when not given.

    Raises:
        InputError: when the sessions grow beyond that context.
    """
    if context is not None and sessions.tokens > context:
        raise InputError(f"sessions of {sessions.tokens} tokens exceed the context of {context}")
    found: dict[tuple[GrowthRule, tuple[Charge, ...], bool], list[str]] = {}
    undecided = []
    for runtime in runtimes:
        own = sessions.tokens if runtime.growth == "contiguous" else model.max_context
        rule = rule_of(runtime, most=context or own)
        try:
            kept = charges(model, runtime, _workload(sessions, runtime))
        except UnsupportedError as error:
            undecided.append(Ungrown(runtime.name, str(error)))
            continue
        found.setdefault((rule, kept, runtime.shares_prefix), []).append(runtime.name)
    return GrowthPlan(
        memfit_version=__version__,
        model=label,
        sessions=sessions,
        tokens=sessions.tokens,
        budget_bytes=budget_bytes,
        rules=tuple(
            _Growing(sessions, rule, kept, shares).answer(tuple(names), budget_bytes)
            for (rule, kept, shares), names in found.items()
        ),
        undecided=tuple(undecided),
    )


@record(frozen=True, slots=True)
class _Growing:
    sessions: Sessions
    rule: GrowthRule
    kept: tuple[Charge, ...]
    shares: bool

    def answer(self, names: tuple[str, ...], budget: int | None) -> Grown:
        events = list(growth_events(self.rule, self.sessions.tokens))
        turns = tuple(self._turns(events))
        last = turns[-1]
        peak = max((self._alive(event) for event in events), default=0)
        copied = sum(self._bytes(event.copied) for event in events)
        return Grown(
            runtimes=names,
            growth=self.rule.kind,
            step=self.rule.step,
            bytes_per_token=sum(c.layers * c.token_bytes for c in self.kept),
            allocated_bytes=last.allocated_bytes,
            held_bytes=last.held_bytes,
            peak_bytes=max(peak, last.allocated_bytes),
            growths=len(events),
            copied_bytes=copied * self.sessions.sessions,
            shared_bytes=self._shared(),
            crossing=self._crossing(events, budget),
            turns=turns,
        )

    def _turns(self, events: list[GrowthEvent]) -> Iterator[Turn]:
        capacity, upcoming = 0, iter(events)
        event = next(upcoming, None)
        for turn in range(1, self.sessions.turns + 1):
            tokens = self.sessions.after(turn)
            while event and event.tokens <= tokens:
                capacity, event = event.after, next(upcoming, None)
            held = sum(c.layers * c.token_bytes * c.held_tokens(tokens) for c in self.kept)
            count = self.sessions.sessions
            allocated = count * self._bytes(capacity) - self._shared()
            yield Turn(turn, tokens, allocated, count * held - self._shared())

    def _alive(self, event: GrowthEvent) -> int:
        """All sessions at an event, the last of them growing while the others have grown."""
        others = (self.sessions.sessions - 1) * self._bytes(event.after)
        both = self._bytes(event.after)
        both += self._bytes(event.before) if self.rule.copies else 0
        # Pages of the prefix are shared from when there are any.
        shared = min(self._shared(), others)
        return others + both - shared

    def _crossing(self, events: list[GrowthEvent], budget: int | None) -> Crossing | None:
        for event in events if budget is not None else ():
            alive = self._alive(event)
            if budget is not None and alive > budget:
                beyond = max(0, event.tokens - self.sessions.prefix_tokens)
                turn = max(1, -(-beyond // self.sessions.turn_tokens))
                return Crossing(event.tokens, turn, alive)
        return None

    def _shared(self) -> int:
        """Full pages of the prefix, in every session but the first."""
        if not self.shares:
            return 0
        pages = round_down(self.sessions.prefix_tokens, self.rule.step)
        full = sum(c.layers * c.token_bytes * pages for c in self.kept if c.window is None)
        return (self.sessions.sessions - 1) * full

    def _bytes(self, tokens: int) -> int:
        return sum(c.layers * c.token_bytes * c.allocated_tokens(tokens) for c in self.kept)


def _workload(sessions: Sessions, runtime: Runtime) -> Workload:
    """The session's end as a workload with the runtime's own settings."""
    step = max(runtime.prefill_step, -(-sessions.tokens // 100_000))
    return Workload(
        prompt_tokens=sessions.tokens,
        prefill_step=step,
        kv_bits=runtime.kv_bits,
        kv_group_size=runtime.kv_group_size,
        quantized_kv_start=runtime.quantized_kv_start,
    )
