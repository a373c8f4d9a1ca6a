"""A policy's limits against figures: pure, in integers, and exactly at a limit passes."""

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.gate.policy import BasisLimit, PolicyLimit
from memfit.estimators.machine.device import Device
from memfit.estimators.results.gate import (
    GateFigures,
    LimitCheck,
    Sense,
    TargetReport,
    TargetStatus,
    Unit,
)

# A broken limit decides whatever the other targets say; then comes what the user can correct, what
# may pass on another try, and what memfit does not know.
_WORST_FIRST: tuple[TargetStatus, ...] = ("broken", "invalid", "unreachable", "undecided", "passed")


class Totals(Struct, frozen=True):
    """What shares are of."""

    device: Device
    """As the runtime uses it: limits on memory are shares of what it may take."""
    baseline: GateFigures | None
    """What growth is measured from, None without a baseline."""


def judge_limits(
    limits: tuple[PolicyLimit, ...], basis: BasisLimit | None, figures: GateFigures, totals: Totals
) -> Iterator[LimitCheck]:
    """Yield a check for every limit, in the order of the policy's keys."""
    for limit in limits:
        yield judge_limit(limit, figures, totals)
    if basis:
        yield _judge_basis(basis, figures)


def judge_limit(limit: PolicyLimit, figures: GateFigures, totals: Totals) -> LimitCheck:
    """Return the check of one limit; a limit on growth needs a baseline in ``totals``."""
    rule = RULES[limit.name]
    figure = rule.figure(figures)
    allowed = rule.allowed(limit, figures, totals)
    passed = figure is not None and (
        figure <= allowed if rule.sense == "at most" else figure >= allowed
    )
    excess = None if passed or figure is None else abs(figure - allowed)
    return LimitCheck(
        limit=limit.name,
        line=limit.line,
        passed=passed,
        missed_by=excess,
        unit=rule.unit,
        sense=rule.sense,
        figure=figure,
        allowed=allowed,
        written=limit.amount.text,
        whole=f"the {totals.device.budget}" if rule.whole is None else rule.whole,
    )


def _judge_basis(limit: BasisLimit, figures: GateFigures) -> LimitCheck:
    order = {"bound": 0, "derived": 1}  # everything else is exact or as good
    return LimitCheck(
        limit="basis",
        line=limit.line,
        passed=order.get(figures.basis, 2) >= order.get(limit.least, 2),
        unit="basis",
        sense="at least",
        figure=figures.basis,
        allowed=limit.least,
        written=limit.least,
        whole="",
    )


class _Rule(Struct, frozen=True):
    figure: Callable[[GateFigures], int | None]
    allowed: Callable[[PolicyLimit, GateFigures, Totals], int]
    sense: Sense = "at most"
    unit: Unit = "bytes"
    whole: str | None = None
    """What a share is of; None: of what the runtime may take of the machine."""


def _of_working_set(limit: PolicyLimit, _: GateFigures, totals: Totals) -> int:
    return limit.amount.most(totals.device.working_set_bytes)


def _of_experts(limit: PolicyLimit, figures: GateFigures, _: Totals) -> int:
    return limit.amount.least(figures.experts or 0)


def _tokens(limit: PolicyLimit, _: GateFigures, __: Totals) -> int:
    return limit.amount.numerator


def _grown(figure: Callable[[GateFigures], int | None]) -> _Rule:
    def allowed(limit: PolicyLimit, _: GateFigures, totals: Totals) -> int:
        assert totals.baseline is not None
        before = figure(totals.baseline)
        if before is None:  # of a file that somebody edited
            raise InputError(f"the baseline has no figure for {limit.name}")
        return before + limit.amount.most(before)

    return _Rule(figure, allowed, whole="the baseline")


def worst(targets: Iterable[TargetReport]) -> TargetStatus:
    """Return the worst status of targets, of which there is at least one."""
    found = {target.status for target in targets}
    return next(status for status in _WORST_FIRST if status in found)


RULES = {
    "peak": _Rule(lambda figures: figures.peak_bytes, _of_working_set),
    "load_peak": _Rule(lambda figures: figures.load_peak_bytes, _of_working_set),
    "wired_limit": _Rule(lambda figures: figures.wired_limit_bytes, _of_working_set),
    "context": _Rule(lambda figures: figures.context_tokens, _tokens, "at least", "tokens", ""),
    "expert_capacity": _Rule(
        lambda figures: figures.expert_capacity,
        _of_experts,
        "at least",
        "experts",
        "a layer's experts",
    ),
    "training_peak": _Rule(lambda figures: figures.training_peak_bytes, _of_working_set),
    "growth.weights": _grown(lambda figures: figures.weights_bytes),
    "growth.kv_per_token": _grown(lambda figures: figures.kv_bytes_per_token),
    "growth.peak": _grown(lambda figures: figures.peak_bytes),
    "growth.training_peak": _grown(lambda figures: figures.training_peak_bytes),
}
