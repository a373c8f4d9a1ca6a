"""The result of ``memfit tune`` as data; renderers only show it."""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.quantities import Bytes, Count, NonEmpty, Number, Positive
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import (
    Basis,
    DeviceSummary,
    LimitName,
    Method,
    ModelSummary,
    Note,
    Recommendation,
    Verdict,
)
from memfit.estimators.results.result import Result
from memfit.estimators.runtimes.measurement import Loaded
from memfit.estimators.sizing.peak_fit import Line

PointStatus = Literal["measured", "skipped", "failed"]


class TuneFigure(Struct, frozen=True, kw_only=True):
    """One figure, measured and estimated; None where that value does not exist."""

    name: str
    """One of `memfit.probes.figures.NAMES`."""
    estimated_bytes: int | None
    basis: Basis | None
    """Basis of the estimate."""
    measured_bytes: int | None
    """Median of the repeats."""
    difference_bytes: int | None
    """Measured minus estimated."""
    spread_bytes: Bytes
    """Largest repeat minus smallest."""


class Speed(Struct, frozen=True, kw_only=True):
    """Medians over the repeats, each with its spread: largest minus smallest."""

    first_token_ns: Positive
    prefill_tokens_per_second: Number
    """Only shown; no figure is computed from it."""
    decode_tokens_per_second: Number | None
    first_token_spread_ns: Count = 0
    prefill_spread: Number = 0.0
    """Tokens per second."""
    decode_spread: Number | None = None
    """Tokens per second."""


class Point(Struct, frozen=True, kw_only=True):
    """One workload: measured, skipped because it cannot run, or failed during the run."""

    workload: Workload
    status: PointStatus
    reason: str | None
    """Why it was skipped or failed."""
    repeats: Count
    estimated_peak_bytes: Bytes | None
    peak_bytes: Bytes | None
    """Median of the repeats."""
    figures: tuple[TuneFigure, ...]
    """A failed point has the figures that it reached."""
    speed: Speed | None
    measurement_id: str | None
    """Id in the store; None when the measurement was not saved."""
    wired_limit_bytes: Bytes | None = None


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
    points: NonEmpty[Point]
    """The first point is the requested workload."""
    margin_bytes: Bytes
    verdict: Verdict
    """On the measured peak and the margin; "unknown" when there is no measured peak."""
    exceeded: tuple[LimitName, ...]
    line: Line | None
    """The line through the measured peaks, None without one."""
    recommendation: Recommendation
    trade: tuple[str, ...]
    """Speed against memory, as sentences."""
    flags: tuple[str, ...]
    """Commands for mlx_lm.generate and mlx_lm.server."""
    notes: tuple[Note, ...]
