"""What ``memfit tune`` found, as data: every renderer shows it and none computes.

The fields mirror the JSON of ``memfit tune --json`` (docs/schema/tune.schema.json); integers are
bytes, tokens or nanoseconds.
"""

from dataclasses import dataclass
from typing import Literal

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

SCHEMA = "memfit.tune/1"
Status = Literal["measured", "skipped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure measured and estimated, and what was measured less what was estimated.

    ``measured_bytes`` is the median, ``spread_bytes`` the largest repeat less the smallest. Any
    side is None where it has no such figure.
    """

    name: str  # "weights", "active", "kv", "kv_held", "ssm", "prefill_peak", "unaccounted", ...
    estimated_bytes: int | None
    basis: Basis | None  # of the estimate
    measured_bytes: int | None
    difference_bytes: int | None
    spread_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians over the repeats, and for each how far the repeats lie apart."""

    first_token_ns: int
    prefill_tokens_per_second: float  # for reading only
    decode_tokens_per_second: float | None
    first_token_spread_ns: int = 0
    prefill_spread: float = 0.0  # tokens a second
    decode_spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting: measured, skipped because it cannot fit, or failed on the way.

    A failed point keeps the figures it reached.
    """

    workload: Workload
    status: Status
    reason: str | None
    repeats: int
    estimated_peak_bytes: int | None
    peak_bytes: int | None  # median
    figures: tuple[Figure, ...]
    speed: Speed | None
    measurement_id: str | None
    wired_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The answer of ``memfit tune``; the first point is the workload that was asked for.

    The verdict is about its measured peak and the margin; unknown when it was not reached.
    """

    memfit_version: str
    model: ModelSummary
    device: DeviceSummary
    mlx_version: str
    mlx_lm_version: str
    method: str  # of the estimates beside the measurements
    prompt_tokens: int
    loaded: Loaded | None
    points: tuple[Point, ...]
    margin_bytes: int
    verdict: Verdict
    exceeded: tuple[str, ...]
    line: Line | None
    recommendation: Recommendation
    trade: tuple[str, ...]  # speed against memory in words
    flags: tuple[str, ...]  # command lines of mlx_lm.generate and mlx_lm.server
    notes: tuple[Note, ...]
    schema: str = SCHEMA
