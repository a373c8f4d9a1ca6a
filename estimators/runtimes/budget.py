"""Whether a need fits a device, by its memory and by what the runtime gives itself."""

from msgspec import Struct

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Device
from memfit.estimators.results.terms import LimitName, Verdict
from memfit.estimators.runtimes.runtime import Budget

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
