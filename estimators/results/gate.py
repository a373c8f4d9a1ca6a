"""What a gate found, as data: renderers show it and compute nothing."""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from memfit.estimators.base.quantities import Bytes, Count, NonEmpty, Positive, Tokens, one_of
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Basis, Source

# broken: a limit does not hold. invalid: the input must be corrected before anything can be said.
# undecided: no figure, or only a bound. unreachable: a source did not answer.
TargetStatus = Literal["passed", "broken", "invalid", "unreachable", "undecided"]
LimitKey = Annotated[
    str,
    one_of(
        *"peak load_peak wired_limit context expert_capacity training_peak basis".split(),
        *("model_context", "runtime_budget", "memory", "host_memory"),
        *("growth.weights", "growth.kv_per_token", "growth.peak", "growth.training_peak"),
    ),
]
BoundName = Literal["weights", "workspace", "baseline_weights", "baseline_workspace"]
Sense = Literal["at most", "at least"]
Unit = Literal["bytes", "tokens", "experts", "basis"]
RemedySetting = Literal[
    "context",
    "kv_bits",
    "prefill_step",
    "quantize",
    "grad_checkpoint",
    "batch_size",
    "num_layers",
    "max_seq_length",
]


class SmallerRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A workload that the target's command allows too, and that takes more."""

    batch: Positive
    prompt_tokens: Positive


class GateFigures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures that limits are set on and that a baseline keeps: bytes or tokens."""

    weights_bytes: Bytes
    kv_bytes_per_token: Bytes
    kv_bytes: Bytes
    state_bytes: Bytes
    workspace_bytes: Bytes
    """Of the run with the largest peak."""
    peak_bytes: Bytes
    """The largest peak of the target's workload and of smaller ones (``peak_of``)."""
    load_peak_bytes: Bytes
    """The most in use while the weights are loaded, for mlx-moe while its slots are filled; always
    an estimate, never a measurement."""
    wired_limit_bytes: Bytes
    """What must stay resident: the peak with the margin of memfit estimate."""
    context_tokens: Tokens | None
    """The longest prompt that fits nine tenths of the working set, None when none does."""
    expert_capacity: Count | None
    """Experts of each layer that fit, None for a model without experts."""
    experts: Count | None
    """Experts a layer has, None for a model without experts."""
    basis: Basis
    """How far the figure of the weights can be trusted."""
    training_peak_bytes: Bytes | None = None
    """The most while mlx_lm.lora runs the target's recipe, None without one."""
    workspace_basis: Basis | None = None
    """How far the figure of the workspace can be trusted; None in the baseline of an older memfit.
    """
    peak_of: SmallerRun | UnsetType = UNSET
    """The smaller workload with the largest peak, where that is above the target's own."""


class FigureChange(Struct, frozen=True):
    """One figure in the baseline and now; None where there is none."""

    figure: str
    before: Count | None
    now: Count | None
    by: int | None
    """Now less before."""


class Remedy(Struct, frozen=True):
    """One setting that alone makes a limit pass."""

    setting: RemedySetting
    value: Positive
    """The largest that passes: of ``context`` a multiple of 256 tokens, of ``kv_bits`` from the
    first token on, of a recipe's numbers one of their halves; 1 turns ``grad_checkpoint`` on."""


class LimitCheck(Struct, frozen=True, kw_only=True):
    """One limit and its figure."""

    limit: LimitKey
    line: Positive
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
    missed_by: Count | None = None
    """The excess of a broken limit, or what is missing to it, of ``unit``."""
    mends: tuple[Remedy, ...] = ()
    undecided_by: tuple[BoundName, ...] = ()
    """The bounds that leave it open whether it passes; empty where it is decided."""
    peak_of: SmallerRun | UnsetType = UNSET
    """The smaller workload that the figure of a peak is of, where that is not the target's own."""

    @property
    def is_passed(self) -> bool:
        """Whether it certainly passes."""
        return self.passed and not self.undecided_by

    @property
    def is_broken(self) -> bool:
        """Whether it certainly does not pass."""
        return not self.passed and not self.undecided_by


class TargetReport(Struct, frozen=True, kw_only=True):
    """One target of a policy."""

    name: str
    line: Positive
    model: str
    device: str
    working_set_bytes: Positive
    budget: str = "working set"
    """What that is, where the runtime may take something else of the machine."""
    status: TargetStatus
    message: str | None = None
    """Why there are no checks, or why some do not decide."""
    checks: tuple[LimitCheck, ...] = ()
    figures: GateFigures | None = None
    baseline_model: str | None = None
    changes: tuple[FigureChange, ...] = ()
    notes: tuple[Note, ...] = ()
    source: Source | None = None
    """Where the model was read; None where it could not be."""


class GateReport(Result, frozen=True, kw_only=True, tag="memfit.gate/1"):
    """All targets that were checked, in the order of the policy; there is at least one."""

    policy: str
    baseline_version: str | None
    """The memfit that wrote the baseline, None when there is no such file."""
    verdict: TargetStatus
    targets: NonEmpty[TargetReport]
