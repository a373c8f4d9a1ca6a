"""The limits of a policy: one row of ``LIMITS`` each, how it is written, and its check.

The keys of a policy and their schema, the checks, the remedies and the names in reports all follow
from the rows. A check is pure and in integers, and exactly at a limit passes.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import (
    Count,
    Positive,
    one_of,
)
from memfit.estimators.gate.figures import GateFigures, SmallerRun
from memfit.estimators.gate.limit_values import (
    MOST_GROWTH,
    NUMBER,
    Amount,
    Experts,
    LimitValue,
    TokenCount,
    Unit,
    parse_buffers,
    parse_context,
    parse_duration,
    parse_experts,
    parse_up_to,
)
from memfit.estimators.gate.remedies import Remedy
from memfit.estimators.machine.device import Device

BoundName = Literal["weights", "workspace", "baseline_weights", "baseline_workspace"]
RequiredBasis = Literal["exact", "derived", "bound"]
Sense = Literal["at most", "at least"]


class Totals(Struct, frozen=True):
    """What shares are of."""

    device: Device
    """As the runtime uses it: limits on memory are shares of what it may take."""
    baseline: GateFigures | None
    """What growth is measured from, None without a baseline."""
    accepts_bounds: bool = False
    """Whether a bound counts as the figure itself."""


class LimitKind(Struct, frozen=True, kw_only=True):
    """How a limit is written, and what a figure is compared with."""

    parse: Callable[[Device | None, Any], LimitValue]
    """What reads its value in a policy; one that nothing on the device exceeds is an error."""
    schema: Any
    """The type of that value in the JSON Schema."""
    allowed: Callable[["PolicyLimit", GateFigures, Totals], int]
    """The largest or smallest figure that passes."""
    relative_to: str | None = None
    """What a share is of; None: of what the runtime may take of the machine."""
    sense: Sense = "at most"
    unit: Unit = "bytes"
    is_growth: bool = False
    """Whether it needs a baseline."""


class LimitRule(Struct, frozen=True):
    """One limit of a policy."""

    key: str
    """Its key under ``limits``; that of ``growth`` after a dot."""
    label: str
    """Its name in reports."""
    kind: LimitKind
    of: Literal["weights", "run", "context", "training"]
    """What the figure is of: the weights alone have no workspace, the largest run has its own."""
    figure: str
    """The figure, a field of `GateFigures`."""
    settings: tuple[str, ...]
    """The settings that may make it pass, by their keys in `SETTINGS`."""

    def figure_of(self, figures: GateFigures) -> int | None:
        """Return the figure, None where a model or a target has none."""
        figure: int | None = getattr(figures, self.figure)
        return figure


class PolicyLimit(Struct, frozen=True):
    """A limit of one target."""

    rule: LimitRule
    line: int
    amount: LimitValue


class BasisLimit(Struct, frozen=True):
    """A limit on the basis of the weights."""

    least: RequiredBasis
    """The weakest that passes; ``bound`` accepts an upper bound."""
    line: int


def _grown(limit: PolicyLimit, _: GateFigures, totals: Totals) -> int:
    before = limit.rule.figure_of(totals.baseline) if totals.baseline else None
    if before is None:  # of a file that somebody edited
        raise InputError(f"the baseline has no figure for {limit.rule.key}")
    return before + limit.amount.most(before)


_MEMORY = LimitKind(
    parse=parse_up_to(1, "working set"),
    schema=Amount,
    allowed=lambda limit, _, totals: limit.amount.most(totals.device.working_set_bytes),
)
_CONTEXT = LimitKind(
    parse=parse_context,
    schema=TokenCount,
    allowed=lambda limit, *_: limit.amount.least(0),
    relative_to="",
    sense="at least",
    unit="tokens",
)
_EXPERTS = LimitKind(
    parse=lambda _, value: parse_experts(value),
    schema=Experts,
    allowed=lambda limit, figures, _: limit.amount.least(figures.experts or 0),
    relative_to="a layer's experts",
    sense="at least",
    unit="experts",
)
_BUFFERS = LimitKind(
    parse=lambda _, value: parse_buffers(value),
    schema=Positive,
    allowed=lambda limit, *_: limit.amount.most(0),
    relative_to="",
    unit="buffers",
)
_DURATIONS = LimitKind(
    parse=lambda _, value: parse_duration(value),
    schema=Annotated[str, Meta(pattern=rf"{NUMBER} *(ms|s|min)$")],
    allowed=lambda limit, *_: limit.amount.most(0),
    relative_to="",
    unit="milliseconds",
)
_GROWTH = LimitKind(
    parse=parse_up_to(MOST_GROWTH, "baseline"),
    schema=Amount,
    allowed=_grown,
    relative_to="the baseline",
    is_growth=True,
)
_WEIGHTS = ("quantize",)
_RUN = ("context", "kv_bits", "prefill_step", "quantize")
_WORKSPACE = ("batch", "prefill_step", "kv_bits", "context")
_TRAINING = ("grad_checkpoint", "batch_size", "quantize", "num_layers", "max_seq_length")


_RULES = (
    LimitRule("peak", "peak", _MEMORY, "run", "peak_bytes", _RUN),
    LimitRule("held", "held memory", _MEMORY, "run", "held_bytes", _RUN),
    LimitRule("buffers", "buffers", _BUFFERS, "weights", "buffers", ()),
    LimitRule("first_token", "first token", _DURATIONS, "weights", "first_token_ms", ("context",)),
    LimitRule("workspace", "workspace", _MEMORY, "run", "workspace_bytes", _WORKSPACE),
    LimitRule("load_peak", "load peak", _MEMORY, "weights", "load_peak_bytes", _WEIGHTS),
    LimitRule("wired_limit", "wired limit", _MEMORY, "run", "wired_limit_bytes", _RUN),
    LimitRule("context", "context", _CONTEXT, "context", "context_tokens", _RUN[1:]),
    LimitRule(
        "expert_capacity", "expert capacity", _EXPERTS, "weights", "expert_capacity", _WEIGHTS
    ),
    LimitRule(
        "training_peak", "training peak", _MEMORY, "training", "training_peak_bytes", _TRAINING
    ),
    LimitRule(
        "growth.weights", "growth of the weights", _GROWTH, "weights", "weights_bytes", _WEIGHTS
    ),
    LimitRule(
        "growth.kv_per_token",
        "growth of KV per token",
        _GROWTH,
        "weights",
        "kv_bytes_per_token",
        ("kv_bits",),
    ),
    LimitRule("growth.peak", "growth of the peak", _GROWTH, "run", "peak_bytes", _RUN),
    LimitRule(
        "growth.training_peak",
        "growth of the training peak",
        _GROWTH,
        "training",
        "training_peak_bytes",
        _TRAINING,
    ),
)
LIMITS = {rule.key: rule for rule in _RULES}
_FEWER = "it does not run the workload; shorter prompts or fewer requests take less"
IMPLIED = {
    "basis": (
        "basis of the weights",
        "give a checkpoint with shard headers that can be read",
    ),
    "model_context": (
        "workload",
        "the model has no longer context; allow_beyond_context: true in the target allows it",
    ),
    "runtime_budget": ("memory that the runtime gives itself", _FEWER),
    "memory": ("GPU and host together", _FEWER),
    "host_memory": ("memory of the host", _FEWER),
}
"""Checks without an amount in a policy: their names in reports, and what makes them pass."""


class LimitCheck(Struct, frozen=True, kw_only=True):
    """One limit and its figure."""

    limit: Annotated[str, one_of(*LIMITS, *IMPLIED)]
    line: Positive
    passed: bool
    unit: Unit
    sense: Sense
    figure: int | str | None
    """Figure in ``unit``, or a basis; None where no context fits, or the model has no experts."""
    allowed: int | str
    """Largest or smallest figure that passes, in ``unit``, or a basis."""
    limit_text: str
    """Limit as the policy has it."""
    relative_to: str
    """Whole that a share is of; empty where no share is possible."""
    excess: Count | None = None
    """Amount above a broken limit, or missing to it, in ``unit``."""
    remedies: tuple[Remedy, ...] = ()
    undecided_by: tuple[BoundName, ...] = ()
    """Bounds that leave it open whether it passes; empty where it is decided."""
    peak_of: SmallerRun | UnsetType = UNSET
    """Smaller workload that the figure of a run is of, where that is not the target's own."""

    @property
    def is_passed(self) -> bool:
        """Whether it certainly passes."""
        return self.passed and not self.undecided_by

    @property
    def is_broken(self) -> bool:
        """Whether it certainly does not pass."""
        return not self.passed and not self.undecided_by


def judge_limit(limit: PolicyLimit, figures: GateFigures, totals: Totals) -> LimitCheck:
    """Return the check of one limit; a limit on growth needs a baseline in ``totals``."""
    rule, kind = limit.rule, limit.rule.kind
    figure, allowed = rule.figure_of(figures), kind.allowed(limit, figures, totals)
    passed = figure is not None and (
        figure <= allowed if kind.sense == "at most" else figure >= allowed
    )
    unknown = () if totals.accepts_bounds else tuple(_undecided_by(limit, figures, allowed, totals))
    relative_to = kind.relative_to
    return LimitCheck(
        limit=rule.key,
        line=limit.line,
        passed=passed,
        undecided_by=unknown,
        excess=None if passed or figure is None else abs(figure - allowed),
        unit=kind.unit,
        sense=kind.sense,
        figure=figure,
        allowed=allowed,
        limit_text=limit.amount.text,
        relative_to=f"the {totals.device.budget}" if relative_to is None else relative_to,
        peak_of=figures.peak_of if rule.of == "run" else UNSET,
    )


def _undecided_by(
    limit: PolicyLimit, figures: GateFigures, allowed: int, totals: Totals
) -> Iterator[BoundName]:
    """Yield the bounds in a comparison, unless what is certain of the figure breaks the limit.

    Growth from a bound allows no less than growth from the true figure, so it can be broken too.
    """
    rule, has_workspace = limit.rule, limit.rule.of != "weights"
    unknown = tuple(bounds(figures, with_workspace=has_workspace))
    certain = None if "weights" in unknown else rule.figure_of(figures)
    if certain is not None and "workspace" in unknown:
        certain = certain - figures.workspace_bytes if rule.of == "run" else None
    if certain is not None and rule.kind.sense == "at most" and certain > allowed:
        return
    yield from unknown
    if totals.baseline and rule.kind.is_growth:
        if totals.baseline.basis == "bound":
            yield "baseline_weights"
        if has_workspace and totals.baseline.workspace_basis == "bound":
            yield "baseline_workspace"


def bounds(figures: GateFigures, *, with_workspace: bool) -> Iterator[BoundName]:
    """Yield what of the figures is a bound, the workspace only where it is compared."""
    if figures.basis == "bound":
        yield "weights"
    if with_workspace and figures.workspace_basis == "bound":
        yield "workspace"


def judge_basis(limit: BasisLimit, figures: GateFigures) -> LimitCheck:
    """Return the check of a limit on the basis of the weights."""
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
