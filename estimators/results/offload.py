"""A plan of cached conversations as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-offload.schema.json.
"""

from msgspec import Struct

from memfit.estimators.results.estimate import DeviceSummary, Note

SCHEMA = "memfit.plan-offload/1"


class SizeRow(Struct, frozen=True):
    """One conversation of ``tokens``: exact bytes, and bytes in whole blocks."""

    tokens: int
    plain_bytes: int
    eight_bit_bytes: int
    four_bit_bytes: int
    blocks: int
    stored_bytes: int
    in_budget: int | None
    """How many such conversations fit in memory."""
    next_chunk_tokens: int


class Pool(Struct, frozen=True):
    """Memory for conversations, in blocks of 256 tokens of one layer."""

    budget_bytes: int
    block_bytes: int
    blocks: int


class Restore(Struct, frozen=True):
    """Peaks while one conversation is restored, alone and with everything else in memory.

    In bulk, all layers are dequantized before any stored layer is freed; streaming frees each
    stored layer as soon as its dequantized copy exists.
    """

    bulk_bytes: int
    streaming_bytes: int
    bulk_total_bytes: int
    streaming_total_bytes: int
    bulk_fits: bool | None
    streaming_fits: bool | None


class Times(Struct, frozen=True):
    """Milliseconds for one conversation; None when a speed is not known."""

    save_ms: int | None
    load_ms: int | None
    prefill_ms: int | None
    times_faster: float | None
    """Prefill time divided by the time to save and load."""


class Disk(Struct, frozen=True):
    """Files of all conversations."""

    stored_bytes: int
    with_reserve_bytes: int
    conversations: int | None
    """How many the free disk space holds."""


class Threshold(Struct, frozen=True):
    """The longest conversation that stays in memory, and agent-memory's fixed threshold."""

    tokens: int | None
    fixed_tokens: int
    fixed_plain_bytes: int
    fixed_stored_bytes: int


class Simulation(Struct, frozen=True):
    """The result of replaying a request trace; milliseconds are None without a speed."""

    requests: int
    agents: int
    hot: int
    """Requests that found their conversation in memory."""
    warm: int
    """Requests that found it on disk."""
    cold: int
    """Requests with an evicted conversation."""
    new: int
    """First requests of an agent."""
    read_bytes: int
    written_bytes: int
    prefill_tokens: int
    saved_tokens: int
    largest_hot_bytes: int
    largest_disk_bytes: int
    read_ms: int | None
    write_ms: int | None
    prefill_ms: int | None
    uncached_prefill_ms: int | None
    """Prefill time without any cache."""


class OffloadPlan(Struct, frozen=True, kw_only=True):
    """The result of ``memfit plan offload``."""

    memfit_version: str
    model: str
    model_type: str
    device: DeviceSummary | None
    conversations: int
    tokens: int
    bits: int
    group_size: int
    layers: int
    state_bytes: int
    weight_bytes: int
    active_bytes: int
    hot_conversations: int | None
    pool: Pool | None
    sizes: tuple[SizeRow, ...]
    restore: Restore
    times: Times
    disk: Disk
    threshold: Threshold
    simulation: Simulation | None
    notes: tuple[Note, ...]
    schema: str = SCHEMA

    @property
    def requested(self) -> SizeRow:
        """The row of the requested length."""
        return next(row for row in self.sizes if row.tokens == self.tokens)
