"""A plan of contexts as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-context.schema.json.
"""

from typing import Literal

from memfit.estimators.base.records import record
from memfit.estimators.results.estimate import Verdict

SCHEMA = "memfit.plan-context/1"
MemoryStatus = Literal["ok", "warn", "fail"]


@record(frozen=True, slots=True)
class Ceilings:
    """Upper bounds of a context in tokens, None where there is none."""

    model: int | None
    requested: int | None
    backend: int | None
    effective: int
    """The lowest of them."""


@record(frozen=True, slots=True)
class LargestContext:
    """The largest context within a budget."""

    budget_bytes: int
    tokens: int
    """0 where nothing fits."""


@record(frozen=True, slots=True)
class ContextFit:
    """The need of the workload compared with the machine."""

    status: MemoryStatus
    required_bytes: int
    recommended_bytes: int
    """The working set."""
    total_bytes: int
    """All memory."""
    headroom_bytes: int
    """The working set less the need; negative when it does not fit."""


@record(frozen=True, slots=True)
class MatrixCell:
    """A number of requests at once, each with the same number of tokens."""

    context_tokens: int
    requests: int
    needed_bytes: int | None
    """None when the runtime cannot run them."""
    verdict: Verdict


@record(frozen=True, slots=True)
class Distribution:
    """Nearest-rank percentiles of token counts."""

    mean: int
    """Rounded up."""
    p50: int
    p90: int
    p95: int
    p99: int
    largest: int


@record(frozen=True, slots=True)
class TrafficPlan:
    """What a recorded set of requests needs; None where it takes a device to say."""

    requests: int
    prompt: Distribution
    completion: Distribution
    total: Distribution
    longest_context: int | None
    """The longest context that fits."""
    fitting: int | None
    """How many requests are within it."""
    context_for_99: int
    """A context long enough for 99 of 100 requests."""
    at_once_for_99: int | None
    """How many requests of that length fit at once."""
    at_once_of_mean: int | None
    """How many requests of the mean length fit at once."""
