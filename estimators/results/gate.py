"""What a gate found, as data: renderers show it and compute nothing.

The fields mirror the JSON of ``memfit gate --format json`` (docs/schema/gate.schema.json).
"""

from typing import Literal

from msgspec import Struct

from memfit.estimators.results.estimate import Basis, Note

SCHEMA = "memfit.gate/1"

# broken: a limit does not hold. invalid: the input must be corrected before anything can be said.
# undecided: no figure, or only a bound. unreachable: a source did not answer.
TargetStatus = Literal["passed", "broken", "invalid", "unreachable", "undecided"]
Sense = Literal["at most", "at least"]
Unit = Literal["bytes", "tokens", "experts", "basis"]
RemedySetting = Literal["context", "kv_bits", "prefill_step", "quantize"]


class GateFigures(Struct, frozen=True, kw_only=True):
    """The figures that limits are set on and that a baseline keeps: bytes or tokens."""

    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    state_bytes: int
    workspace_bytes: int
    peak_bytes: int
    """The peak as memfit estimate gives it."""
    load_peak_bytes: int
    """The weights once loaded."""
    wired_limit_bytes: int
    """What must stay resident: the peak with the margin of memfit estimate."""
    context_tokens: int | None
    """The longest prompt that fits nine tenths of the working set, None when none does."""
    expert_capacity: int | None
    """Experts of each layer that fit, None for a model without experts."""
    experts: int | None
    """Experts a layer has, None for a model without experts."""
    basis: Basis
    """How far the figure of the weights can be trusted."""


class FigureChange(Struct, frozen=True):
    """One figure in the baseline and now; None where there is none."""

    figure: str
    before: int | None
    now: int | None
    by: int | None
    """Now less before."""


class Remedy(Struct, frozen=True):
    """One setting that alone makes a limit pass."""

    setting: RemedySetting
    value: int
    """The largest that passes: of ``context`` a multiple of 256 tokens, of ``kv_bits`` from the
    first token on."""


class LimitCheck(Struct, frozen=True, kw_only=True):
    """One limit and its figure."""

    limit: str
    line: int
    passed: bool
    unit: Unit
    sense: Sense
    figure: int | str | None
    """Of ``unit``, or a basis; None where no context fits, or the model has no experts."""
    allowed: int | str
    """Of ``unit``, or a basis."""
    written: str
    """The limit as the policy has it."""
    whole: str
    """What a share is of."""
    missed_by: int | None = None
    """The excess of a broken limit, or what is missing to it, of ``unit``."""
    mends: tuple[Remedy, ...] = ()


class TargetReport(Struct, frozen=True, kw_only=True):
    """One target of a policy."""

    name: str
    line: int
    model: str
    device: str
    working_set_bytes: int
    status: TargetStatus
    message: str | None = None
    """Why there are no checks, or why they do not decide."""
    checks: tuple[LimitCheck, ...] = ()
    figures: GateFigures | None = None
    baseline_model: str | None = None
    changes: tuple[FigureChange, ...] = ()
    notes: tuple[Note, ...] = ()


class GateReport(Struct, frozen=True, kw_only=True):
    """All targets that were checked, in the order of the policy; there is at least one."""

    memfit_version: str
    policy: str
    baseline_version: str | None
    """The memfit that wrote the baseline, None when there is no such file."""
    verdict: TargetStatus
    targets: tuple[TargetReport, ...]
    schema: str = SCHEMA
