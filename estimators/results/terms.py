"""Closed sets of names in results, and the largest moment of a run."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.units import Count, one_of
from memfit.estimators.base.workload import CallPhase

Basis = Literal["exact", "traced", "derived", "measured", "bound", "assumed"]
Verdict = Literal["fits", "tight", "exceeds", "does_not_load", "unknown"]
Phase = Literal["load", "vision", "prefill", "decode"]
Level = Literal["info", "warning"]
State = Literal["change", "keep", "impossible", "not_applicable"]
Cost = Literal["none", "speed", "quality", "hardware"]
Source = Literal["local", "hub", "config", "sample", "index", "gguf"]
Method = Literal["formula", "recorded", "trace", "measure"]
LimitName = Literal[
    "working_set",
    "memory",
    "max_buffer",
    "runtime_budget",
    "cache_budget",
    "context",
    "host_memory",
]
PartName = Annotated[
    str,
    one_of(*"embedding attention mlp experts shared_experts router norm head vision other".split()),
]
SettingName = Annotated[
    str,
    one_of(*"prefill_step kv_bits weight_bits memory_bytes gpu_layers host_experts".split()),
]
Settings = dict[SettingName, Count]
"""``host_experts`` are the layers, from the first, with their experts on the host."""


class Lines(Sequence[str]):
    """Lines of text that are made when one is read."""

    def __init__(self, make: Callable[[], tuple[str, ...]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> tuple[str, ...]:
        return self._make()

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)


class PeakMoment(Struct, frozen=True):
    """The most memory in use at once during a run, with the phase it falls in."""

    phase: Phase
    nbytes: int
    """Everything alive: weights, caches, states and the transient."""
    workspace_bytes: int
    """What of it is neither weights nor the caches and states as the workload leaves them."""
    largest_buffer_bytes: int
    """The largest single allocation of the run."""
    largest_buffer: str
    """What it holds."""
    explanation: Sequence[str]
    """The sum of the moment's parts, as a line of text."""
    prefill_bytes: int | None = None
    """The most in use before the last token of the prompt, None when it is not known by phase."""
    decode_bytes: int | None = None
    """The most in use after that."""
    call_bytes: Mapping[CallPhase, int] = {}
    """The most in use during each call, where it is known by call."""
    held_bytes: int | None = None
    """The most that is in use and kept for reuse together; None where that is not known."""
    held_phase: Phase | None = None
    """The phase that falls in."""
    batch_bytes: int = 0
    """What a batch of work keeps in use, by trace: one more or less may be under way."""

    def raised(self, more: int) -> "PeakMoment":
        """Return the moment with ``more`` bytes, which are in use all the time."""
        prefill, decode = self.prefill_bytes, self.decode_bytes
        return replace(
            self,
            nbytes=self.nbytes + more,
            prefill_bytes=None if prefill is None else prefill + more,
            decode_bytes=None if decode is None else decode + more,
            call_bytes={call: nbytes + more for call, nbytes in self.call_bytes.items()},
            held_bytes=None if self.held_bytes is None else self.held_bytes + more,
        )

    @property
    def run_bytes(self) -> int:
        """The most in use once the model is loaded."""
        phases = [b for b in (self.prefill_bytes, self.decode_bytes) if b is not None]
        return max(phases, default=self.nbytes)

    def with_load(self, load_bytes: int) -> "PeakMoment":
        """Return the largest moment of the run and of the load before it, of ``load_bytes``."""
        if load_bytes <= self.nbytes:
            return self
        line = f"load = {load_bytes:,}: the weights, and the arrays of files that"
        line += " some are made from"
        return replace(
            self,
            phase="load",
            nbytes=load_bytes,
            workspace_bytes=self.workspace_bytes + load_bytes - self.nbytes,
            held_bytes=None if self.held_bytes is None else max(self.held_bytes, load_bytes),
            held_phase="load" if load_bytes > (self.held_bytes or load_bytes) else self.held_phase,
            explanation=(line, *self.explanation),
        )
