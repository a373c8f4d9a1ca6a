"""A policy's limits against figures: pure, in integers, and exactly at a limit passes."""

from collections.abc import Callable, Iterator
from typing import Literal

from memfit.estimators.base.records import record
from memfit.estimators.gate.figures import Figures
from memfit.estimators.gate.policy import BasisLimit, Limit
from memfit.estimators.gate.remedies import Remedy

Sense = Literal["at most", "at least"]
Unit = Literal["bytes", "tokens", "experts", "basis"]


@record(frozen=True, slots=True, kw_only=True)
class Check:
    """One limit against its figure; both are integers of ``unit``, or the names of bases.

    ``figure`` is None where there is none: no context fits, or the model has no experts.
    ``whole`` names what a share is of; ``missed_by`` is how far a broken limit is away.
    """

    limit: str
    line: int
    passed: bool
    unit: Unit
    sense: Sense
    figure: int | str | None
    allowed: int | str
    written: str
    whole: str
    missed_by: int | None = None
    mends: tuple[Remedy, ...] = ()


@record(frozen=True, slots=True)
class Reference:
    """What shares are of: the machine's working set, and the figures of the baseline."""

    working_set_bytes: int
    baseline: Figures | None


def judge_limits(
    limits: tuple[Limit, ...], basis: BasisLimit | None, figures: Figures, reference: Reference
) -> Iterator[Check]:
    """Yield a check for every limit, in the order of the policy's keys."""
    for limit in limits:
        yield judge_limit(limit, figures, reference)
    if basis:
        yield _judge_basis(basis, figures)


def judge_limit(limit: Limit, figures: Figures, reference: Reference) -> Check:
    """Return the check of one limit; a limit on growth needs a baseline in ``reference``."""
    rule = RULES[limit.name]
    figure = rule.figure(figures)
    allowed = rule.allowed(limit, figures, reference)
    passed = figure is not None and (
        figure <= allowed if rule.sense == "at most" else figure >= allowed
    )
    missed = None if passed or figure is None else abs(figure - allowed)
    return Check(
        limit=limit.name,
        line=limit.line,
        passed=passed,
        missed_by=missed,
        unit=rule.unit,
        sense=rule.sense,
        figure=figure,
        allowed=allowed,
        written=limit.amount.text,
        whole=rule.whole,
    )


def _judge_basis(limit: BasisLimit, figures: Figures) -> Check:
    order = {"bound": 0, "derived": 1}  # everything else is exact or as good
    return Check(
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


@record(frozen=True, slots=True)
class _Rule:
    figure: Callable[[Figures], int | None]
    allowed: Callable[[Limit, Figures, Reference], int]
    sense: Sense = "at most"
    unit: Unit = "bytes"
    whole: str = "the working set"


def _of_working_set(limit: Limit, _: Figures, reference: Reference) -> int:
    return limit.amount.most(reference.working_set_bytes)


def _of_experts(limit: Limit, figures: Figures, _: Reference) -> int:
    return limit.amount.least(figures.experts or 0)


def _tokens(limit: Limit, _: Figures, __: Reference) -> int:
    return limit.amount.numerator


def _grown(figure: Callable[[Figures], int]) -> _Rule:
    def allowed(limit: Limit, _: Figures, reference: Reference) -> int:
        assert reference.baseline is not None
        before = figure(reference.baseline)
        return before + limit.amount.most(before)

    return _Rule(figure, allowed, whole="the baseline")


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
    "growth.weights": _grown(lambda figures: figures.weights_bytes),
    "growth.kv_per_token": _grown(lambda figures: figures.kv_bytes_per_token),
    "growth.peak": _grown(lambda figures: figures.peak_bytes),
}
