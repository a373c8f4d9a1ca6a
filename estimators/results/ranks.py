"""Several machines for a model, and several models for a fleet of machines."""

from msgspec import Struct

from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.units import Bytes, Count, Positive, Tokens
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import (
    DeviceSummary,
    ModelSummary,
    Note,
    RuntimeSummary,
)
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Verdict


class RankChoice(Struct, frozen=True, kw_only=True):
    """A number of machines and a way to share the model; figures are of the tightest rank."""

    machines: Positive
    parallel: Parallel | None
    """None: one machine."""
    verdict: Verdict
    needed_bytes: Bytes
    weights_bytes: Bytes
    on: tuple[str, ...] = ()
    """The machines by rank, where several were named."""
    longest_context: Tokens | None
    """The longest prompt that fits on every rank; None: none does."""
    commands: tuple[str, ...]
    """To paste into a shell."""


class Impossible(Struct, frozen=True, kw_only=True):
    """A choice that mlx-lm does not have."""

    machines: Positive
    parallel: Parallel
    reason: str


class RanksPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-ranks/1"):
    """The answer of ``memfit plan ranks``."""

    model: ModelSummary
    runtime: RuntimeSummary
    device: DeviceSummary
    workload: Workload
    choices: tuple[RankChoice, ...]
    """By the number of machines."""
    impossible: tuple[Impossible, ...]
    least_machines: Positive | None
    """The fewest that the workload fits on; None: it fits on none that were looked at."""
    second_adds_tokens: int | None
    """How much longer a prompt can be on two machines than on one; None: not known."""
    notes: tuple[Note, ...] = ()


class Placement(Struct, frozen=True, kw_only=True):
    """One copy of a model, and where it runs."""

    model: str
    machines: tuple[str, ...]
    """One for each rank; empty: it fits nowhere."""
    parallel: Parallel | None
    needed_bytes: Bytes | None
    """On each of the machines; on a single one where it fits nowhere, None: unknown."""
    reason: str = ""
    """Why it is placed nowhere."""


class Leftover(Struct, frozen=True, kw_only=True):
    """What is left of machines that are equal and equally used."""

    device: str
    machines: Count
    working_set_bytes: Bytes
    free_bytes: Bytes


class FleetPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-fleet/1"):
    """The answer of ``memfit plan ranks --fleet``."""

    placements: tuple[Placement, ...]
    left: tuple[Leftover, ...]
    runtimes: tuple[RuntimeSummary, ...]
    """Those that the models are sized for."""
    placed: Count
    """Copies that have a place."""
