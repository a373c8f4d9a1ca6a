"""A plan of experts as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-experts.schema.json.
"""

from memfit.estimators.base.records import record
from memfit.estimators.results.estimate import Basis, DeviceSummary, Note, Verdict

SCHEMA = "memfit.plan-experts/1"


@record(frozen=True, slots=True)
class Regime:
    """The capacity under one macOS; ``budget_bytes`` are 71 % of the working set."""

    os_regime: str
    working_set_bytes: int
    measured: bool
    budget_bytes: int
    capacity: int


@record(frozen=True, slots=True)
class Misses:
    """What does not lie in a slot, for each token; percentages are for reading.

    ``disk_microseconds`` is None where no bandwidth is known.
    """

    coverage_percent: float
    misses_per_token: float
    disk_bytes_per_token: int
    disk_microseconds_per_token: int | None
    basis: Basis


@record(frozen=True, slots=True)
class CapacityRow:
    """Memory with so many experts of each layer; ``warnings`` are codes of the plan's notes.

    ``running_bytes`` and ``startup_bytes`` are what must fit, ``page_cache_bytes`` the rest of
    the machine's memory, from which misses are read when they were read before.
    """

    capacity: int
    non_expert_bytes: int
    expert_bytes: int
    weight_bytes: int
    lookup_bytes: int
    kv_bytes: int
    state_bytes: int
    workspace_bytes: int
    running_bytes: int
    startup_bytes: int
    page_cache_bytes: int | None
    verdict: Verdict
    pinned_slots: int
    found_slots: int
    filler_slots: int
    misses: Misses
    warnings: tuple[str, ...]


@record(frozen=True, slots=True)
class Adaptive:
    """Slots given to the layers that need them, within the bytes of the uniform capacity."""

    capacities: tuple[int, ...]
    expert_bytes: int
    misses: Misses


@record(frozen=True, slots=True)
class Worth:
    """Whether keeping only a part of the experts pays; None where a condition is not known."""

    pays: bool | None
    reasons: tuple[str, ...]


@record(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """The answer of ``memfit plan experts``.

    ``capacity`` is mlx-moe's own for the device, None where it is less than a token needs; with
    ``fitting_capacity`` run and start-up fit in nine tenths of the working set, with
    ``fitting_run_capacity`` the run does, however it was started.
    """

    memfit_version: str
    model: str
    model_type: str
    device: DeviceSummary | None
    context_tokens: int
    layers: int
    experts: int
    top_k: int
    slot_bytes: int
    uniform_slots: bool
    all_expert_bytes: int
    basis: Basis
    regimes: tuple[Regime, ...]
    capacity: int | None
    fitting_capacity: int | None
    fitting_run_capacity: int | None
    wired_limit_bytes: int | None
    rows: tuple[CapacityRow, ...]
    adaptive: Adaptive | None
    worth: Worth
    notes: tuple[Note, ...]
    schema: str = SCHEMA

    @property
    def chosen(self) -> CapacityRow | None:
        """The row of the capacity for the device."""
        return next((row for row in self.rows if row.capacity == self.capacity), None)
