"""What is known of a runtime: its defaults, its budget and where its rules were read."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import Count, NonEmpty, Positive, Tokens, ceil_div
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MLX_LM_VERSION, MLX_VERSION, MLX_VLM_VERSION, MlxVersions
from memfit.estimators.results.growth import Growth
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import LimitName, Verdict

Charges = Literal["its own caches", "attention layers", "every layer"]
Limited = Literal["working_set", "working_set_for_cache", "memory", "cache"]


# The runtimes of settings that are not llama.cpp's.
_OWNERS = {
    "kv_cache_dtype": "vllm",
    "max_requests": "vllm",
    "gpu_memory_utilization": "vllm",
    "capacity": "mlx-moe",
}


class Budget(Struct, frozen=True):
    """The memory that a runtime gives itself."""

    of: Limited
    """The memory the share is of, and whether it is for everything or for the cache alone."""
    share: Count = 100
    """Percent of that memory."""
    bytes: Positive | None = None
    """A fixed size, in place of a share."""

    def of_device(self, device: Device) -> int:
        """Return the budget in bytes."""
        if self.bytes is not None:
            return self.bytes
        whole = device.memory_bytes if self.of == "memory" else device.working_set_bytes
        return whole * self.share // 100

    @property
    def is_taken(self) -> bool:
        """Whether the runtime takes it in any case, and leaves the rest free."""
        return self.of == "memory"

    @property
    def for_cache(self) -> bool:
        """Whether it limits the cache alone."""
        return self.of in ("cache", "working_set_for_cache")

    @property
    def is_limit(self) -> bool:
        """Whether nothing runs above it.

        A share of the working set ends no run: mlx-lm warns above its own, mlx-moe chooses experts
        by it and zinc a context. All of them run up to the whole.
        """
        return self.of != "working_set"


class MemoryShare(Budget, frozen=True):
    """A share of the memory that need not be a whole number of percent."""

    percent: Fraction = Fraction(100)

    def of_device(self, device: Device) -> int:
        return int(device.memory_bytes * self.percent // 100)


class Runtime(Struct, frozen=True, kw_only=True):
    """A runtime with its settings; all counts are tokens."""

    name: str
    version: str
    """The version or commit its rules were read in."""
    prefill_step: Positive
    """Tokens computed at once: a chunk of mlx-lm, a micro-batch of llama.cpp."""
    kv_step: Count
    """What the capacity of a cache is a multiple of."""
    kv_group_size: Count
    quantized_kv_start: Tokens
    growth: Growth
    """How a cache gets room for more tokens (runtimes/growth.py)."""
    charges: Charges
    """The layers that it keeps a cache for."""
    budget: Budget
    keeps: str
    """What it keeps in which memory, in words."""
    allocates: str
    """How it allocates its cache, in words."""
    source: str
    mlx_version: tuple[Count, ...] = ()
    """Empty for a runtime without MLX, and where it is not known."""
    mlx_lm_version: tuple[Count, ...] = ()
    """Of the classes that it runs; empty where it is not known."""
    mlx_vlm_version: tuple[Count, ...] = ()
    batch: Count = 0
    """Tokens of a batch, which has several micro-batches; 0 where there is no such thing."""
    kv_bits: Positive | None = None
    """The bits of its cache unless others are set."""
    cache_dtype: Literal["F16", "F32"] | None = None
    """The element type of its cache; None for that of the activations."""
    kv_initial: Count = 0
    """The first capacity of a cache that doubles."""
    least_prefill_step: Count = 0
    context_step: Count = 1
    """What the context that it chooses by itself is a multiple of."""
    shares_prefix: bool = False
    """Whether sessions with the same beginning share its full pages."""
    max_context: Positive | None = None
    """A limit that the runtime was set to."""
    faults: tuple[str, ...] = ()
    """What is wrong in its own answers; memfit shows its answer and the right one."""

    def configured(self, environ: Mapping[str, str]) -> "Runtime":
        """Return the runtime with the settings it takes from an environment.

        Raises:
            InputError: when it cannot read a variable.
        """
        return self

    def on(self, device: Device | None) -> "Runtime":
        """Return the runtime with the defaults that it has on a device."""
        return self

    def with_setting(self, name: str, value: Any) -> "Runtime":
        """Return the runtime with a setting of its own, from a value or a text.

        Raises:
            InputError: when it has no such setting, or the value cannot be read.
        """
        if name == "gpu_memory_utilization" and self.budget.of == "memory":
            return replace(self, budget=MemoryShare("memory", int(value), None, value))
        if name == "batch_size":
            raise InputError(
                f"sequences at once are {setting('batch')}, tokens computed at once"
                f" {setting('prefill_step')}"
            )
        runtime, owner = setting("runtime"), _OWNERS.get(name, "llama.cpp")
        other = f", or {setting('kv_bits')} 8" if name == "kv_cache_dtype" else ""
        raise InputError(
            f"{self.name} has no such setting; give {runtime} {owner}, which has it{other}"
        )

    @property
    def versions(self) -> MlxVersions:
        """The versions of MLX, mlx-lm and mlx-vlm with the rules that it follows."""
        return MlxVersions(
            self.mlx_version or MLX_VERSION,
            self.mlx_lm_version or MLX_LM_VERSION,
            self.mlx_vlm_version or MLX_VLM_VERSION,
        )


class RuntimeTable(Result, frozen=True, kw_only=True, tag="memfit.runtimes/2"):
    """The answer of ``memfit runtimes``."""

    runtimes: NonEmpty[Runtime]


OF_RUNTIME: frozenset[LimitName] = frozenset({"cache_budget", "runtime_budget"})
"""Limits that a runtime sets itself."""


def comfortable_bytes(memory_bytes: int) -> int:
    """Return the bytes of a memory that a run fills without reserve: nine tenths, rounded down.

    mlx-lm warns when the weights alone exceed that share of the working set (generate.py,
    wired_limit); here the whole peak is compared with it.

    >>> comfortable_bytes(11)
    9
    """
    return memory_bytes * 9 // 10


class HostNeed(Struct, frozen=True):
    """The bytes that a run needs in the memory of the host, beside that of the GPU."""

    nbytes: int
    memory_bytes: int | None
    """The host's memory; None where its size is not known."""
    is_divided: bool
    """Whether layers or experts that could be on the GPU are on the host."""

    @property
    def is_undecided(self) -> bool:
        """Whether a part of the model is on a host of unknown size."""
        return self.is_divided and self.memory_bytes is None

    @property
    def least_memory_bytes(self) -> int:
        """The memory of the smallest host on which it fits: `comfortable_bytes` of it is enough."""
        return ceil_div(self.nbytes * 10, 9)

    def verdict(self) -> Verdict:
        """Return whether it fits; unknown where the size of the host is."""
        if self.memory_bytes is None:
            return "unknown"
        if self.nbytes > self.memory_bytes:
            return "exceeds"
        return "tight" if self.nbytes > comfortable_bytes(self.memory_bytes) else "fits"


class Need(Struct, frozen=True):
    """The bytes a run needs, and the budget of the runtime that runs it."""

    peak_bytes: int
    """At its largest moment, with the margin."""
    largest_buffer_bytes: int
    budgeted_bytes: int = 0
    """The part that the runtime's own budget has to hold."""
    budget: Budget | None = None
    error_bytes: int = 0
    """By how much the peak may be too low."""
    shared_bytes: int = 0
    """Of a GPU and a host that share the memory, what both need; 0 where the peak is all."""
    excess_tokens: int = 0
    """Tokens beyond the context at which the runtime stops."""
    host: HostNeed | None = None
    """What the host of a GPU has to hold; None where it has no memory of its own."""


def recommended_bytes(budget: Budget | None, device: Device) -> int:
    """Return what a run may take: what its runtime takes in any case, else nine tenths."""
    if budget and budget.is_taken:
        return budget.of_device(device)
    return comfortable_bytes(device.working_set_bytes)


def judge(need: Need, device: Device | None) -> tuple[Verdict, tuple[LimitName, ...]]:
    """Return the verdict and the limits that are exceeded.

    Exactly at a limit is within it. Without a device it is unknown, and where a part of the model
    was moved to a host of unknown size.
    """
    # Beyond the context that a runtime stops at nothing runs, on any device.
    exceeded: list[LimitName] = ["context"] if need.excess_tokens else []
    if device is None:
        return ("exceeds" if exceeded else "unknown"), tuple(exceeded)
    if need.peak_bytes > device.working_set_bytes:
        exceeded.append("working_set")
    if need.shared_bytes > device.memory_bytes:
        exceeded.append("memory")
    if device.max_buffer_bytes is not None and need.largest_buffer_bytes > device.max_buffer_bytes:
        exceeded.append("max_buffer")
    budget = need.budget
    if budget and budget.is_limit and need.budgeted_bytes > budget.of_device(device):
        exceeded.append("cache_budget" if budget.for_cache else "runtime_budget")
    on_host = need.host.verdict() if need.host else "fits"
    if on_host == "exceeds":
        exceeded.append("host_memory")
    if exceeded:
        return "exceeds", tuple(exceeded)
    if need.host and need.host.is_undecided:
        return "unknown", ()
    if budget and budget.is_taken:
        return "fits", ()
    # A peak that may be above the limit is never said to fit without reserve.
    tight = (
        need.peak_bytes > comfortable_bytes(device.working_set_bytes)
        or need.peak_bytes + need.error_bytes > device.working_set_bytes
        or need.shared_bytes > comfortable_bytes(device.memory_bytes)
        or on_host == "tight"
    )
    return ("tight" if tight else "fits"), ()
