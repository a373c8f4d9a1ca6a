"""The result of ``memfit tune`` as data; renderers only show it."""

from typing import Literal, NamedTuple

from msgspec import Struct

from memfit.estimators.base.errors import MachineError
from memfit.estimators.base.units import Bytes, Count, NonEmpty, Positive
from memfit.estimators.base.workload import Workload
from memfit.estimators.plans.wired.tickets import Tickets, tickets_of
from memfit.estimators.results.advice import FirstToken, Recommendation, Recommended
from memfit.estimators.results.estimate import DecodeSpeed, DeviceSummary, ModelSummary, Note
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import LimitName, Method, Verdict
from memfit.estimators.runtimes.measurement import Loaded
from memfit.estimators.sizing.peak_fit import Line
from memfit.probes.figures import TuneFigure
from memfit.probes.speed import Speed

PointStatus = Literal["measured", "skipped", "failed"]


class Point(Struct, frozen=True, kw_only=True):
    """One workload: measured, skipped because it cannot run, or failed during the run."""

    workload: Workload
    status: PointStatus
    reason: str | None
    """Why it was skipped or failed."""
    repeats: Count
    estimated_peak_bytes: Bytes | None
    peak_bytes: Bytes | None
    """Median of the repeats, or of the warm-up where it is above all of them."""
    figures: tuple[TuneFigure, ...]
    """A failed point has the figures that it reached."""
    speed: Speed | None
    measurement_id: str | None
    """Id in the store; None when the measurement was not saved."""
    wired_limit_bytes: Bytes | None = None

    @property
    def parts(self) -> tuple[int, int, int]:
        """The measured bytes of weights, of caches and of the rest of the peak."""
        figures = {figure.name: figure.measured_bytes or 0 for figure in self.figures}
        weights, caches = figures.get("active", 0), figures.get("kv", 0) + figures.get("ssm", 0)
        return weights, caches, (self.peak_bytes or 0) - weights - caches


class WiredMeasurement(NamedTuple):
    """The figures of WiredMemoryMeasurement (mlx-swift-lm, MLXLMCommon/WiredMemoryUtils.swift)."""

    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    token_count: int
    prefill_step_size: int

    @property
    def total_bytes(self) -> int:
        """Weights, caches and workspace together."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def peak_active_bytes(self) -> int:
        """The most in use during the prefill: the workspace is what it has above the others."""
        return self.total_bytes


class TuneResult(Result, frozen=True, kw_only=True, tag="memfit.tune/2"):
    """The answer of ``memfit tune``."""

    model: ModelSummary
    device: DeviceSummary
    mlx_version: str
    mlx_lm_version: str
    method: Method
    """Of the estimates."""
    prompt_tokens: Positive
    loaded: Loaded | None
    file_bytes: Bytes = 0
    """Size of the weight files."""
    points: NonEmpty[Point]
    """The first point is the requested workload."""
    margin_bytes: Bytes
    first_token: FirstToken | None
    """The estimated seconds of the first point, None where the chip is not known."""
    decode_speed: DecodeSpeed | None
    """The estimated speed of the first point, None where the chip is not known."""
    verdict: Verdict
    """On the measured peak and the margin; "unknown" when there is no measured peak."""
    exceeded: tuple[LimitName, ...]
    line: Line | None
    """The line through the measured peaks, None without one."""
    recommendation: Recommendation
    recommended: Recommended | None
    """What to set for the commands of ``flags``; None where nothing fits."""
    trade: tuple[str, ...]
    """Speed against memory, as sentences."""
    flags: tuple[str, ...]
    """Commands for mlx_lm.generate and mlx_lm.server."""
    report: tuple[str, ...] = ()
    """What to report when a figure differs by more than its stated error: no names, no paths."""
    notes: tuple[Note, ...]

    @property
    def wired(self) -> WiredMeasurement | None:
        """What mlx-swift-lm's WiredMemoryUtils.tune would return, None where it was not run."""
        point = self.points[0]
        figures = {each.name: each.measured_bytes for each in point.figures}
        workspace, kv = figures.get("swift_workspace"), figures.get("swift_kv")
        if self.loaded is None or workspace is None or kv is None:
            return None
        work = point.workload
        weights = self.loaded.weights_bytes
        return WiredMeasurement(weights, kv, workspace, work.prompt_tokens, work.prefill_step)

    def tickets(self) -> Tickets:
        """Return the tickets of the requested workload.

        Raises:
            MachineError: when it was not measured.
        """
        point = self.points[0]
        if point.status != "measured" or point.peak_bytes is None:
            raise MachineError(f"there are no tickets: {point.reason or 'nothing was measured'}")
        weights, caches, _ = point.parts
        return tickets_of(
            model=self.model.id,
            workload=point.workload,
            basis=f"measured on {self.device.name}",
            parts=(weights, caches),
            peak_bytes=point.peak_bytes,
            device=self.device,
        )

    @property
    def usual_points(self) -> tuple[Point, ...]:
        """The measured points without a wired limit."""
        return tuple(
            each
            for each in self.points
            if each.status == "measured" and each.wired_limit_bytes is None
        )
