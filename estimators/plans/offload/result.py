"""A plan of cached conversations as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-offload.schema.json.
"""

from memfit.estimators.base.records import record
from memfit.estimators.plans.offload.cache_tiers import Simulation
from memfit.estimators.results.estimate import DeviceSummary, Note

SCHEMA = "memfit.plan-offload/1"


@record(frozen=True, slots=True)
class SizeRow:
    """One conversation of ``tokens``, exactly and in blocks; ``in_budget`` fit in memory."""

    tokens: int
    plain_bytes: int
    eight_bit_bytes: int
    four_bit_bytes: int
    blocks: int
    stored_bytes: int
    in_budget: int | None
    next_chunk_tokens: int


@record(frozen=True, slots=True)
class Pool:
    """Memory for conversations, in blocks of 256 tokens of a layer."""

    budget_bytes: int
    block_bytes: int
    blocks: int


@record(frozen=True, slots=True)
class Restore:
    """The peaks of one conversation's restore, alone and with all else that is in memory.

    In bulk every layer is made plain before any stored one is given up; a stream gives up each
    layer's stored form once its plain one is there.
    """

    bulk_bytes: int
    streaming_bytes: int
    bulk_total_bytes: int
    streaming_total_bytes: int
    bulk_fits: bool | None
    streaming_fits: bool | None


@record(frozen=True, slots=True)
class Times:
    """Milliseconds for one conversation; ``times_faster`` is saving and reading against prefill."""

    save_ms: int | None
    load_ms: int | None
    prefill_ms: int | None
    times_faster: float | None


@record(frozen=True, slots=True)
class Disk:
    """Files of all conversations, with the reserve; ``conversations`` are what the disk takes."""

    stored_bytes: int
    with_reserve_bytes: int
    conversations: int | None


@record(frozen=True, slots=True)
class Threshold:
    """The tokens up to which conversations stay in memory, and what agent-memory's would take."""

    tokens: int | None
    fixed_tokens: int
    fixed_plain_bytes: int
    fixed_stored_bytes: int


@record(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """The answer of ``memfit plan offload``."""

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
    def asked(self) -> SizeRow:
        """The row of the conversation that was asked about."""
        return next(row for row in self.sizes if row.tokens == self.tokens)
