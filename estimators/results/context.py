"""A plan of contexts as data: renderers show it and compute nothing."""

from msgspec import UNSET, Struct, UnsetType

from memfit.estimators.base.units import Bytes, Count, Tokens
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.advice import ImageAdvice, StepSchedule
from memfit.estimators.results.estimate import (
    DeviceSummary,
    Limit,
    ModelSummary,
    Note,
    RuntimeSummary,
)
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Verdict


class MemoryProfile(Struct, frozen=True, kw_only=True):
    """Memory of a runtime without weights, in bytes: a fixed part, and a part for each token."""

    fixed_device_local_bytes: Bytes
    fixed_host_visible_bytes: Bytes
    device_local_bytes_per_token: Bytes
    host_visible_bytes_per_token: Bytes
    gpu_ssm_bytes: Bytes = 0
    """Recurrent states, part of ``fixed_device_local_bytes``."""


class Ceilings(Struct, frozen=True):
    """Upper bounds of a context in tokens, None where there is none."""

    model: Count | None
    requested: Count | None
    backend: Count | None
    effective: Count
    """The lowest of them."""


class LargestContext(Struct, frozen=True):
    """The largest context within a budget."""

    budget_bytes: Bytes
    tokens: Tokens
    """0 where nothing fits."""


class AutoContext(Struct, frozen=True):
    """The context that a runtime chooses by itself, and the right one."""

    budget_bytes: Bytes
    """What the runtime allows itself."""
    tokens: Tokens | None
    """Its own choice; None for a runtime that makes none."""
    right_tokens: Tokens
    reason: str = ""
    """Why they differ; empty when they do not."""


class ContextFit(Struct, frozen=True):
    """The need of the workload compared with the machine."""

    required_bytes: Bytes
    recommended_bytes: Bytes
    """The working set."""
    total_bytes: Bytes
    """All memory."""
    headroom_bytes: int
    """The working set less the need; negative when it does not fit."""


class MatrixCell(Struct, frozen=True):
    """A number of requests at once, each with the same number of tokens."""

    context_tokens: Tokens
    requests: Count
    needed_bytes: Bytes | None
    """None when the runtime cannot run them."""
    verdict: Verdict
    reason: str = ""
    """Why there is no figure."""


class Distribution(Struct, frozen=True):
    """Nearest-rank percentiles of token counts."""

    mean: Count
    """Rounded up."""
    p50: Count
    p90: Count
    p95: Count
    p99: Count
    largest: Count


class TrafficPlan(Struct, frozen=True):
    """What a recorded set of requests needs; None where it takes a device to say."""

    requests: Count
    prompt: Distribution
    completion: Distribution
    total: Distribution
    longest_context: Tokens | None
    """The longest context that fits."""
    fitting: Count | None
    """How many requests are within it."""
    context_for_99: Count
    """A context long enough for 99 of 100 requests."""
    at_once_for_99: Count | None
    """How many requests of that length fit at once."""
    at_once_of_mean: Count | None
    """How many requests of the mean length fit at once."""


class HostVisible(Struct, frozen=True):
    """Host memory next to a GPU with memory of its own."""

    needed_bytes: Bytes
    memory_bytes: Bytes | None
    """All that the host has; None: not known."""


class ContextPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-context/1"):
    """The answer of ``memfit plan context``; what depends on a device is None without one."""

    model: ModelSummary
    runtime: RuntimeSummary
    device: DeviceSummary | None
    workload: Workload
    margin_bytes: Bytes
    weights_bytes: Bytes
    profile: MemoryProfile
    ceilings: Ceilings
    device_local: LargestContext | None
    """Within the working set, without what lies in host memory."""
    unified: LargestContext | None
    """Within the working set, everything included; None on a GPU with memory of its own."""
    host: HostVisible | None
    """What the ``device_local`` context takes of the host, next to such a GPU."""
    automatic: AutoContext | None
    longest_context: Tokens | None
    """Within what is recommended, in steps of 256; None also when nothing fits."""
    recommended_bytes: Bytes | None
    """Nine tenths of the working set, or what the runtime takes of the memory in any case."""
    fit: ContextFit | None
    verdict: Verdict
    limits: tuple[Limit, ...]
    """What else may end the workload, with its figure."""
    longest_verdict: Verdict
    """Of the longest context: tight where something else than its bytes may end it."""
    matrix: tuple[MatrixCell, ...]
    largest_batch: Count | None
    """The most requests as long as the workload's prompt that fit at once."""
    schedule: StepSchedule | None
    """None where one step runs as long a prompt, or no program of mlx-lm runs it."""
    traffic: TrafficPlan | None
    assumptions: tuple[str, ...]
    notes: tuple[Note, ...]
    images: ImageAdvice | UnsetType = UNSET
    """What the device has room for in addition to the text of a prompt with images."""
