"""A plan of contexts as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-context.schema.json.
"""

from typing import Literal

from msgspec import Struct

from memfit.estimators.results.estimate import (
    DeviceSummary,
    ModelSummary,
    Note,
    RuntimeSummary,
    Verdict,
    WorkloadSummary,
)

SCHEMA = "memfit.plan-context/1"
MemoryStatus = Literal["ok", "warn", "fail"]


class MemoryProfile(Struct, frozen=True, kw_only=True):
    """Memory of a runtime without weights, in bytes: a fixed part, and a part for each token."""

    fixed_device_local_bytes: int
    fixed_host_visible_bytes: int
    device_local_bytes_per_token: int
    host_visible_bytes_per_token: int
    gpu_ssm_bytes: int = 0
    """Recurrent states, part of ``fixed_device_local_bytes``."""


class Ceilings(Struct, frozen=True):
    """Upper bounds of a context in tokens, None where there is none."""

    model: int | None
    requested: int | None
    backend: int | None
    effective: int
    """The lowest of them."""


class LargestContext(Struct, frozen=True):
    """The largest context within a budget."""

    budget_bytes: int
    tokens: int
    """0 where nothing fits."""


class AutoContext(Struct, frozen=True):
    """The context that a runtime chooses by itself, and the right one."""

    budget_bytes: int
    """What the runtime allows itself."""
    tokens: int | None
    """Its own choice; None for a runtime that makes none."""
    right_tokens: int
    reason: str = ""
    """Why they differ; empty when they do not."""


class ContextFit(Struct, frozen=True):
    """The need of the workload compared with the machine."""

    status: MemoryStatus
    required_bytes: int
    recommended_bytes: int
    """The working set."""
    total_bytes: int
    """All memory."""
    headroom_bytes: int
    """The working set less the need; negative when it does not fit."""


class MatrixCell(Struct, frozen=True):
    """A number of requests at once, each with the same number of tokens."""

    context_tokens: int
    requests: int
    needed_bytes: int | None
    """None when the runtime cannot run them."""
    verdict: Verdict


class Distribution(Struct, frozen=True):
    """Nearest-rank percentiles of token counts."""

    mean: int
    """Rounded up."""
    p50: int
    p90: int
    p95: int
    p99: int
    largest: int


class TrafficPlan(Struct, frozen=True):
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


class ContextPlan(Struct, frozen=True, kw_only=True):
    """The answer of ``memfit plan context``; what depends on a device is None without one."""

    memfit_version: str
    model: ModelSummary
    runtime: RuntimeSummary
    device: DeviceSummary | None
    workload: WorkloadSummary
    margin_bytes: int
    weights_bytes: int
    profile: MemoryProfile
    ceilings: Ceilings
    device_local: LargestContext | None
    """Within the working set, without what lies in host memory."""
    unified: LargestContext | None
    """Within the working set, everything included."""
    automatic: AutoContext | None
    longest_context: int | None
    """Within nine tenths of the working set, in steps of 256; None also when nothing fits."""
    fit: ContextFit | None
    verdict: Verdict
    matrix: tuple[MatrixCell, ...]
    largest_batch: int | None
    """The most requests as long as the workload's prompt that fit at once."""
    traffic: TrafficPlan | None
    assumptions: tuple[str, ...]
    notes: tuple[Note, ...]
    schema: str = SCHEMA
