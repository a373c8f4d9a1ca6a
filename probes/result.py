"""The result of ``memfit tune`` as data; renderers only show it.

The fields are the keys of ``memfit tune --json`` (docs/schema/tune.schema.json). Integers are
bytes, tokens or nanoseconds.
"""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import (
    Basis,
    DeviceSummary,
    ModelSummary,
    Note,
    Recommendation,
    Verdict,
)
from memfit.estimators.runtimes.measurement import Loaded
from memfit.estimators.sizing.peak_fit import Line

SCHEMA = "memfit.tune/2"
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
    spread_bytes: int
    """Largest repeat minus smallest."""


class Speed(Struct, frozen=True, kw_only=True):
    """Medians over the repeats, each with its spread: largest minus smallest."""

    first_token_ns: int
    prefill_tokens_per_second: float
    """Only shown; no figure is computed from it."""
    decode_tokens_per_second: float | None
    first_token_spread_ns: int = 0
    prefill_spread: float = 0.0
    """Tokens per second."""
    decode_spread: float | None = None
    """Tokens per second."""


class Point(Struct, frozen=True, kw_only=True):
    """One workload: measured, skipped because it cannot run, or failed during the run."""

    workload: Workload
    status: PointStatus
    reason: str | None
    """Why it was skipped or failed."""
    repeats: int
    estimated_peak_bytes: int | None
    peak_bytes: int | None
    """Median of the repeats."""
    figures: tuple[TuneFigure, ...]
    """A failed point has the figures that it reached."""
    speed: Speed | None
    measurement_id: str | None
    """Id in the store; None when the measurement was not saved."""
    wired_limit_bytes: int | None = None


class TuneResult(Struct, frozen=True, kw_only=True):
    """The answer of ``memfit tune``."""

    memfit_version: str
    model: ModelSummary
    device: DeviceSummary
    mlx_version: str
    mlx_lm_version: str
    method: str
    """Method of the estimates: "trace" or "formula"."""
    prompt_tokens: int
    loaded: Loaded | None
    points: tuple[Point, ...]
    """The first point is the requested workload."""
    margin_bytes: int
    verdict: Verdict
    """On the measured peak and the margin; "unknown" when there is no measured peak."""
    exceeded: tuple[str, ...]
    line: Line | None
    """The line through the measured peaks, None without one."""
    recommendation: Recommendation
    trade: tuple[str, ...]
    """Speed against memory, as sentences."""
    flags: tuple[str, ...]
    """Commands for mlx_lm.generate and mlx_lm.server."""
    notes: tuple[Note, ...]
    schema: str = SCHEMA
