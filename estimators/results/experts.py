"""A plan of experts as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-experts.schema.json.
"""

from msgspec import Struct

from memfit.estimators.results.estimate import Basis, DeviceSummary, Note, Verdict

SCHEMA = "memfit.plan-experts/1"


class RegimeCapacity(Struct, frozen=True):
    """The capacity under one macOS release."""

    os_regime: str
    working_set_bytes: int
    measured: bool
    """Whether Apple's default for this memory size was measured or computed."""
    budget_bytes: int
    """71 % of the working set."""
    capacity: int


class ExpertMisses(Struct, frozen=True):
    """Routed experts that are not in a slot, per token; percentages are for display."""

    coverage_percent: float
    misses_per_token: float
    disk_bytes_per_token: int
    disk_microseconds_per_token: int | None
    """None without a disk bandwidth."""
    basis: Basis


class CapacityRow(Struct, frozen=True):
    """Memory when every layer keeps ``capacity`` experts."""

    capacity: int
    non_expert_bytes: int
    expert_bytes: int
    weight_bytes: int
    lookup_bytes: int
    kv_bytes: int
    state_bytes: int
    workspace_bytes: int
    running_bytes: int
    """Peak of the run; this and ``startup_bytes`` must fit."""
    startup_bytes: int
    page_cache_bytes: int | None
    """Memory the run leaves for the page cache, which serves repeated misses."""
    verdict: Verdict
    pinned_slots: int
    found_slots: int
    filler_slots: int
    misses: ExpertMisses
    warnings: tuple[str, ...]
    """Codes of the plan's notes."""


class LayerCapacities(Struct, frozen=True):
    """Slots per layer chosen by use, within the bytes of the uniform capacity."""

    capacities: tuple[int, ...]
    expert_bytes: int
    misses: ExpertMisses


class Worth(Struct, frozen=True):
    """Whether keeping only a part of the experts pays off."""

    pays: bool | None
    """None when a condition is not known."""
    reasons: tuple[str, ...]


class ExpertsPlan(Struct, frozen=True, kw_only=True):
    """The result of ``memfit plan experts``."""

    memfit_version: str
    model: str
    model_type: str
    device: DeviceSummary | None
    context_tokens: int
    layers: int
    experts: int
    top_k: int
    slot_bytes: int
    """Bytes of the largest slot."""
    uniform_slots: bool
    all_expert_bytes: int
    basis: Basis
    regimes: tuple[RegimeCapacity, ...]
    capacity: int | None
    """mlx-moe's capacity for the device; None when it is below the top k."""
    fitting_capacity: int | None
    """Most experts with which start-up and run fit in 90 % of the working set."""
    fitting_run_capacity: int | None
    """Most experts with which the run fits, whatever the start-up took."""
    wired_limit_bytes: int | None
    rows: tuple[CapacityRow, ...]
    adaptive: LayerCapacities | None
    worth: Worth
    notes: tuple[Note, ...]
    schema: str = SCHEMA

    @property
    def chosen(self) -> CapacityRow | None:
        """The row of the device's capacity."""
        return next((row for row in self.rows if row.capacity == self.capacity), None)
