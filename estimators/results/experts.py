"""A plan of experts as data: renderers show it and compute nothing."""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from memfit.estimators.base.units import Bytes, Count, Number, Positive, Tokens, one_of
from memfit.estimators.results.estimate import DeviceSummary, Note, RuntimeSummary
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Basis, Verdict


class RegimeCapacity(Struct, frozen=True):
    """The capacity under one macOS release."""

    os_regime: str
    working_set_bytes: Positive
    measured: bool
    """Whether Apple's default for this memory size was measured or computed."""
    budget_bytes: Bytes
    """71 % of the working set."""
    capacity: Count


class ExpertMisses(Struct, frozen=True):
    """Routed experts that are not in a slot, per token; percentages are for display."""

    coverage_percent: Number
    misses_per_token: Number
    disk_bytes_per_token: Bytes
    disk_microseconds_per_token: Count | None
    """None without a disk bandwidth."""
    basis: Basis


class CapacityRow(Struct, frozen=True):
    """Memory when every layer keeps ``capacity`` experts."""

    capacity: Count
    non_expert_bytes: Bytes
    expert_bytes: Bytes
    weight_bytes: Bytes
    lookup_bytes: Bytes
    kv_bytes: Bytes
    state_bytes: Bytes
    workspace_bytes: Bytes
    running_bytes: Bytes
    """Peak of the run; this and ``startup_bytes`` must fit."""
    startup_bytes: Bytes
    """Peak of mlx-moe's loader, which reads one file after another."""
    layered_startup_bytes: Bytes
    """Peak of the loader of ``memfit tune experts``, which reads one tensor after another."""
    page_cache_bytes: Bytes | None
    """Memory the run leaves for the page cache, which serves repeated misses."""
    verdict: Verdict
    pinned_slots: Count
    found_slots: Count
    filler_slots: Count
    misses: ExpertMisses
    warnings: tuple[str, ...]
    """Codes of the plan's notes."""


class LayerCapacities(Struct, frozen=True):
    """Slots per layer chosen by use, within the bytes of the uniform capacity."""

    capacities: tuple[Count, ...]
    expert_bytes: Bytes
    misses: ExpertMisses


class MeasuredCapacity(Struct, frozen=True, kw_only=True):
    """A saved measurement of `memfit tune experts` on this machine."""

    capacity: Positive
    policy: str
    prompt_tokens: Positive
    startup_bytes: Bytes
    peak_bytes: Bytes
    decode_tokens_per_second: Number | None
    misses_per_token: Number
    """Of the generated tokens."""
    measurement_id: str


ReplayPolicy = Literal["static", "lru", "pinned", "swap", "adaptive"]


class ReplayedCapacity(Struct, frozen=True, kw_only=True):
    """Recorded routing with a number of slots, for each generated token."""

    capacity: Positive
    policy: Annotated[str, one_of("static", "lru", "pinned", "swap", "adaptive")]
    """``static``: a missing expert is skipped; ``lru``: read into the slot used longest ago;
    ``pinned``: so too, and those of most prompts never leave, as ``memfit tune experts --policy
    load``; ``swap``: skipped and read between tokens, as mlx-moe; ``adaptive``: so too, with as
    many bytes divided between the layers by their use."""
    misses_per_token: Number
    reads_per_token: Number
    read_bytes_per_token: Bytes
    disk_microseconds_per_token: Count | None
    """None without a disk bandwidth."""
    tokens_per_second: Number | None
    """With the time of the disk, from the least that the device is expected to decode with all
    experts; None without a bandwidth of the disk and of the device."""


class Worth(Struct, frozen=True):
    """Whether keeping only a part of the experts pays off."""

    pays: bool | None
    """None when a condition is not known."""
    reasons: tuple[str, ...]


class ExpertsPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-experts/1"):
    """The result of ``memfit plan experts``."""

    model: str
    model_type: str
    runtime: RuntimeSummary
    device: DeviceSummary | None
    context_tokens: Tokens
    layers: Count
    experts: Count
    top_k: Count
    slot_bytes: Bytes
    """Bytes of the largest slot."""
    uniform_slots: bool
    all_expert_bytes: Bytes
    basis: Basis
    regimes: tuple[RegimeCapacity, ...]
    capacity: Count | None
    """All experts where start-up and run fit with them, else mlx-moe's capacity for the device;
    None when that is below the top k."""
    fitting_capacity: Count | None
    """Most experts with which start-up and run fit in 90 % of the working set."""
    fitting_run_capacity: Count | None
    """Most experts with which the run fits, whatever the start-up took."""
    wired_limit_bytes: Bytes | None
    rows: tuple[CapacityRow, ...]
    adaptive: LayerCapacities | None
    worth: Worth
    replayed: tuple[ReplayedCapacity, ...] = ()
    """Of a recording, by capacity and policy."""
    wanted_tokens_per_second: Positive | None = None
    least_capacities: dict[str, Positive | None] | UnsetType = UNSET
    """The least capacity of each policy with the wanted speed, None where none has it."""
    measured: tuple[MeasuredCapacity, ...] = ()
    """On this machine, with the installed versions."""
    notes: tuple[Note, ...]

    @property
    def chosen(self) -> CapacityRow | None:
        """The row of the device's capacity."""
        return next((row for row in self.rows if row.capacity == self.capacity), None)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why the chosen capacity may be no good though it fits."""
        codes = self.chosen.warnings if self.chosen and self.chosen.verdict != "exceeds" else ()
        return tuple(note.message for note in self.notes if note.code in codes)

    @property
    def verdict(self) -> Verdict:
        """Of the chosen capacity: with a caveat it is tight at best."""
        if self.chosen is None:
            return "unknown"
        return "tight" if self.chosen.verdict == "fits" and self.caveats else self.chosen.verdict
