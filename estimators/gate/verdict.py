"""A policy's limits against figures: pure, in integers, and exactly at a limit passes."""

from collections.abc import Callable, Iterable, Iterator

from msgspec import UNSET, Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.gate.policy import RUN_LIMITS, BasisLimit, PolicyLimit
from memfit.estimators.machine.device import Device
from memfit.estimators.results.gate import (
    BoundName,
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
    accepts_bounds: bool = False
    """Whether a bound counts as the figure itself."""


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
        undecided_by=()
        if totals.accepts_bounds
        else _undecided_by(limit, figures, allowed, totals),
        excess=excess,
        unit=rule.unit,
        sense=rule.sense,
        figure=figure,
        allowed=allowed,
        limit_text=limit.amount.text,
        relative_to=f"the {totals.device.budget}" if rule.relative_to is None else rule.relative_to,
        peak_of=figures.peak_of if limit.name in RUN_LIMITS else UNSET,
    )


def _undecided_by(
    limit: PolicyLimit, figures: GateFigures, allowed: int, totals: Totals
) -> tuple[BoundName, ...]:
    """The bounds in what is compared, unless what is known of the figure breaks the limit already.

    Growth from a bound allows no less than growth from the true figure, so it can be broken too.
    """
    rule = RULES[limit.name]
    found: list[BoundName] = list(bounds(figures, with_workspace=rule.known is not None))
    known = rule.known if "workspace" in found and rule.known else rule.figure
    least = None if "weights" in found else known(figures)
    if least is not None and rule.sense == "at most" and least > allowed:
        return ()
    if totals.baseline and limit.name.startswith("growth."):
        baseline = totals.baseline
        found += ["baseline_weights"] * (baseline.basis == "bound")
        is_bound = rule.known is not None and baseline.workspace_basis == "bound"
        found += ["baseline_workspace"] * is_bound
    return tuple(found)


def bounds(figures: GateFigures, *, with_workspace: bool) -> Iterator[BoundName]:
    """Yield what of the figures is a bound, the workspace only where it is compared."""
    if figures.basis == "bound":
        yield "weights"
    if with_workspace and figures.workspace_basis == "bound":
        yield "workspace"


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
        limit_text=limit.least,
        relative_to="",
    )


class _Rule(Struct, frozen=True):
    figure: Callable[[GateFigures], int | None]
    allowed: Callable[[PolicyLimit, GateFigures, Totals], int]
    sense: Sense = "at most"
    unit: Unit = "bytes"
    relative_to: str | None = None
    """What a share is of; None: of what the runtime may take of the machine."""
    known: Callable[[GateFigures], int | None] | None = None
    """What is known of a figure where its workspace is a bound; None: it has no workspace."""


def _of_working_set(limit: PolicyLimit, _: GateFigures, totals: Totals) -> int:
    return limit.amount.most(totals.device.working_set_bytes)


def _of_experts(limit: PolicyLimit, figures: GateFigures, _: Totals) -> int:
    return limit.amount.least(figures.experts or 0)


def _tokens(limit: PolicyLimit, _: GateFigures, __: Totals) -> int:
    return limit.amount.numerator


def _without_workspace(figure: Callable[[GateFigures], int]) -> Callable[[GateFigures], int]:
    return lambda figures: figure(figures) - figures.workspace_bytes


def _nothing(_: GateFigures) -> None:
    return None


def _peak(figures: GateFigures) -> int:
    return figures.peak_bytes


def _wired(figures: GateFigures) -> int:
    return figures.wired_limit_bytes


def _training(figures: GateFigures) -> int | None:
    return figures.training_peak_bytes


def _grown(
    figure: Callable[[GateFigures], int | None],
    known: Callable[[GateFigures], int | None] | None = None,
) -> _Rule:
    def allowed(limit: PolicyLimit, _: GateFigures, totals: Totals) -> int:
        assert totals.baseline is not None
        before = figure(totals.baseline)
        if before is None:  # of a file that somebody edited
            raise InputError(f"the baseline has no figure for {limit.name}")
        return before + limit.amount.most(before)

    return _Rule(figure, allowed, relative_to="the baseline", known=known)


def worst(targets: Iterable[TargetReport]) -> TargetStatus:
    """Return the worst status of targets, of which there is at least one."""
    found = {target.status for target in targets}
    return next(status for status in _WORST_FIRST if status in found)


RULES = {
    "peak": _Rule(_peak, _of_working_set, known=_without_workspace(_peak)),
    "load_peak": _Rule(lambda figures: figures.load_peak_bytes, _of_working_set),
    "wired_limit": _Rule(_wired, _of_working_set, known=_without_workspace(_wired)),
    "context": _Rule(
        lambda figures: figures.context_tokens, _tokens, "at least", "tokens", "", _nothing
    ),
    "expert_capacity": _Rule(
        lambda figures: figures.expert_capacity,
        _of_experts,
        "at least",
        "experts",
        "a layer's experts",
    ),
    "training_peak": _Rule(_training, _of_working_set, known=_nothing),
    "growth.weights": _grown(lambda figures: figures.weights_bytes),
    "growth.kv_per_token": _grown(lambda figures: figures.kv_bytes_per_token),
    "growth.peak": _grown(_peak, _without_workspace(_peak)),
    "growth.training_peak": _grown(_training, _nothing),
}
