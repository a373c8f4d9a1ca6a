"""The result of ``memfit tune`` as data; renderers only show it."""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count, NonEmpty, Positive
from memfit.estimators.base.workload import Workload
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
    def usual_points(self) -> tuple[Point, ...]:
        """The measured points without a wired limit."""
        return tuple(
            each
            for each in self.points
            if each.status == "measured" and each.wired_limit_bytes is None
        )
