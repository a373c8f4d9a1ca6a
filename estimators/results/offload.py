"""A plan of cached conversations as data: renderers show it and compute nothing."""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Bytes, Count, Number, Tokens
from memfit.estimators.results.estimate import DeviceSummary, Note, RuntimeSummary
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Basis


class SizeRow(Struct, frozen=True):
    """One conversation of ``tokens``: exact bytes, and bytes in whole blocks."""

    tokens: Tokens
    plain_bytes: Bytes
    eight_bit_bytes: Bytes
    four_bit_bytes: Bytes
    blocks: Count
    stored_bytes: Bytes
    in_budget: Count | None
    """How many such conversations fit in memory."""
    next_chunk_tokens: Tokens


class Pool(Struct, frozen=True):
    """Memory for conversations, in blocks of 256 tokens of one layer."""

    budget_bytes: Bytes
    block_bytes: Bytes
    blocks: Count


class MeasuredStorage(Struct, frozen=True, kw_only=True):
    """What ``memfit tune cache`` measured here, of the length nearest to that of the plan."""

    measurement_id: str
    tokens: Tokens
    bits: Count
    """Of the file: those of the plan where they were measured, else the most."""
    read_bytes_per_second: Count | None
    """Of the restore as stored."""
    write_bytes_per_second: Count | None
    """Until file and checksum are on the disk; None for a file that was there."""
    prefill_tokens_per_second: Count
    from_disk: bool
    """Whether the file was read from the disk: else the system may have had it in memory."""
    bulk_bytes: Bytes | None
    """Peak of a restore in bulk, of the plan's tokens, bits and groups; None: not measured."""
    streaming_bytes: Bytes | None
    """The same layer by layer."""


class Speeds(Struct, frozen=True):
    """Disk bytes per second and prefill tokens per second; None when not known.

    Raises:
        InputError: when one is not positive.
    """

    read: Count | None = None
    write: Count | None = None
    prefill: Count | None = None

    def __post_init__(self) -> None:
        for name, speed in (("read", self.read), ("write", self.write), ("prefill", self.prefill)):
            if speed is not None and speed < 1:
                raise InputError(f"{name} speed {speed}: must be at least 1 per second")

    def or_measured(self, storage: MeasuredStorage | None) -> "Speeds":
        """Return these, and the measured ones in place of those that are not known."""
        if storage is None:
            return self
        return Speeds(
            storage.read_bytes_per_second if self.read is None else self.read,
            storage.write_bytes_per_second if self.write is None else self.write,
            storage.prefill_tokens_per_second if self.prefill is None else self.prefill,
        )


class Restore(Struct, frozen=True):
    """Peaks while one conversation is restored, alone and with everything else in memory.

    In bulk, all layers are dequantized before any stored layer is freed; streaming frees each
    stored layer as soon as its dequantized copy exists. What mx.dequantize allocates is included;
    without a device as on a Mac.
    """

    bulk_bytes: Bytes
    streaming_bytes: Bytes
    bulk_total_bytes: Bytes
    streaming_total_bytes: Bytes
    bulk_fits: bool | None
    streaming_fits: bool | None
    basis: Basis
    """``measured`` with peaks of ``memfit tune cache``, else ``derived``."""
    cpu_bulk_bytes: Bytes
    """In bulk on MLX's CPU backend, which dequantises by integers of 4 bytes."""
    cpu_streaming_bytes: Bytes


class Times(Struct, frozen=True):
    """Milliseconds for one conversation; None when a speed is not known."""

    save_ms: Count | None
    load_ms: Count | None
    prefill_ms: Count | None
    times_faster: Number | None
    """Prefill time divided by the time to save and load."""


class Disk(Struct, frozen=True):
    """Files of all conversations."""

    stored_bytes: Bytes
    with_reserve_bytes: Bytes
    conversations: Count | None
    """How many the free disk space holds."""


class Threshold(Struct, frozen=True):
    """The longest conversation that stays in memory, and agent-memory's fixed threshold."""

    tokens: Tokens | None
    fixed_tokens: Tokens
    fixed_plain_bytes: Bytes
    fixed_stored_bytes: Bytes


Policy = Literal["reactive", "proactive", "hybrid"]


class Simulation(Struct, frozen=True):
    """The result of replaying a request trace; milliseconds are None where they are not known."""

    requests: Count
    agents: Count
    hot: Count
    """Requests that found their conversation in memory."""
    warm: Count
    """Requests that found it on disk."""
    cold: Count
    """Requests with an evicted conversation."""
    new: Count
    """First requests of an agent."""
    read_bytes: Bytes
    written_bytes: Bytes
    prefill_tokens: Tokens
    saved_tokens: Tokens
    largest_hot_bytes: Bytes
    largest_disk_bytes: Bytes
    read_ms: Count | None = None
    write_ms: Count | None = None
    prefill_ms: Count | None = None
    uncached_prefill_ms: Count | None = None
    """Prefill time without any cache."""

    @property
    def waiting_ms(self) -> int | None:
        """What users wait for: reloads and prefills, as files are written later."""
        if self.read_ms is None or self.prefill_ms is None:
            return None
        return self.read_ms + self.prefill_ms


class PolicyRun(Struct, frozen=True):
    """The same requests with one rule of eviction.

    ``reactive``: a conversation leaves memory when another needs its room, the least recently used
    first. ``proactive``: each is written to the disk as soon as its request ends. ``hybrid``: those
    above a threshold are, the others as ``reactive``.
    """

    policy: Policy
    threshold_tokens: Tokens | None
    """Of ``hybrid``."""
    simulation: Simulation


class OffloadPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-offload/1"):
    """The result of ``memfit plan offload``."""

    model: str
    model_type: str
    runtime: RuntimeSummary
    device: DeviceSummary | None
    conversations: Count
    tokens: Tokens
    bits: Count
    group_size: Count
    layers: Count
    state_bytes: Bytes
    weight_bytes: Bytes
    active_bytes: Bytes
    hot_conversations: Count | None
    pool: Pool | None
    sizes: tuple[SizeRow, ...]
    restore: Restore
    times: Times
    speeds: Speeds
    """As given, else as measured."""
    measured: MeasuredStorage | None
    disk: Disk
    threshold: Threshold
    simulation: Simulation | None
    """Of the reactive policy."""
    policies: tuple[PolicyRun, ...]
    """All policies, with a request trace."""
    notes: tuple[Note, ...]
