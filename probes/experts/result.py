"""The result of ``memfit tune experts`` as data; renderers only show it."""

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count, Number, Positive
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import DeviceSummary, Note
from memfit.estimators.results.result import Result
from memfit.probes.agreement import Agreement
from memfit.probes.experts.slots import Policy
from memfit.probes.result import PointStatus
from memfit.probes.speed import Speed


class PlannedFigure(Struct, frozen=True):
    """Bytes as `memfit plan experts` computes them, and as they were measured."""

    planned_bytes: Bytes | None
    measured_bytes: Bytes | None


class SlotTraffic(Struct, frozen=True, kw_only=True):
    """What one phase did with the slots, over all runs."""

    tokens: Count
    uses: Count
    """Experts that its tokens were routed to, over all layers."""
    misses: Count
    """Those without a slot."""
    reads: Count
    """Experts read from the disk; the tokens of a chunk share one."""
    read_bytes: Bytes
    wait_ns: Count
    """Time in which the run waited for the disk."""
    repeated: Count
    """Steps that were done again after a miss."""

    def per_token(self, count: int) -> float:
        """Return a count for each token of the phase, which has at least one."""
        return count / self.tokens


class DiscoveryResult(Struct, frozen=True, kw_only=True):
    """The run without experts: only the routers choose."""

    weights_bytes: Bytes
    """All weights but the experts."""
    peak_bytes: Bytes
    """Of loading."""
    agreement_percent: Number | None
    """Share of the full model's routing that the pass without experts predicts."""


class ExpertsPoint(Struct, frozen=True, kw_only=True):
    """The model with ``capacity`` experts in each layer."""

    capacity: Positive
    status: PointStatus
    reason: str | None
    pinned_slots: Count
    profiled_slots: Count
    filler_slots: Count
    coverage_percent: Number
    """Share of the routing in the slots, on the held-out prompts."""
    weights: PlannedFigure
    startup: PlannedFigure
    """The peak of loading."""
    prefill_peak: PlannedFigure
    decode_peak: PlannedFigure
    load_ns: Count | None
    speed: Speed | None
    prefill: SlotTraffic | None
    decode: SlotTraffic | None
    agreement: Agreement | None
    """With the full model; None where that was not run."""
    measurement_id: str | None
    wired_limit_bytes: Bytes | None = None
    """The wired limit that was set, None for none."""

    @property
    def decode_tokens_per_second(self) -> float | None:
        return self.speed.decode_tokens_per_second if self.speed else None

    @property
    def parts(self) -> tuple[int, int, int]:
        """The measured bytes of weights, of the rest of the run, and of the start-up above it."""
        weights, startup, *run = (
            figure.measured_bytes or 0
            for figure in (self.weights, self.startup, self.prefill_peak, self.decode_peak)
        )
        return weights, max(0, max(run) - weights), max(0, startup - max(*run, weights))


class Offloading(Struct, frozen=True, kw_only=True):
    """The answer: whether fewer experts pay, and how many."""

    pays: bool | None
    """None when too little was measured."""
    capacity: Positive | None
    """The smallest that is fast enough and agrees well enough."""
    startup_bytes: Bytes | None
    """Its peak of loading, as a limit for a gate."""
    slowdown_percent: Number
    """The most that was allowed, of the decode speed."""
    agreement_percent: Number
    """The least share of equal tokens that was allowed."""
    reasons: tuple[str, ...]


class WarmStart(Struct, frozen=True, kw_only=True):
    """Loading from a prepacked directory."""

    directory: str
    capacity: Positive
    file_bytes: Bytes
    load_ns: Count
    cold_load_ns: Count
    """Loading the same experts from the checkpoint."""
    startup_bytes: Bytes
    agreement: Agreement | None


class ExpertsTuneResult(Result, frozen=True, kw_only=True, tag="memfit.tune-experts/1"):
    """The answer of ``memfit tune experts``."""

    model: str
    model_type: str
    device: DeviceSummary
    mlx_version: str
    mlx_lm_version: str
    layers: Positive
    """Layers with experts."""
    experts: Positive
    top_k: Positive
    expert_bytes: Bytes
    """Of all experts."""
    policy: Policy
    workload: Workload
    profiled_prompts: Positive
    profiled_tokens: Positive
    held_out_prompts: Count
    """0: the profile's own prompts were measured."""
    profile_of_full_model: bool
    """Whether the profile is of a run with the experts."""
    universal_experts: Count
    """Used by at least half of the prompts, over all layers."""
    discovery: DiscoveryResult
    full: ExpertsPoint | None
    """The model as mlx-lm runs it; None where it does not fit."""
    points: tuple[ExpertsPoint, ...]
    answer: Offloading
    warm: WarmStart | None
    report: tuple[str, ...] = ()
    """What to report when a figure differs by more than its stated error: no names, no paths."""
    notes: tuple[Note, ...]
