"""``memfit plan offload``: conversations of agents, cached in memory and on disk.

The tiers are agent-memory's, with one difference: its fixed threshold of 8192 tokens is replaced
by the threshold that the budget allows.
"""

from collections.abc import Iterator
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import ANY_CPU, ANY_MAC
from memfit.estimators.plans.offload.cache_tiers import Tiers, milliseconds, simulate
from memfit.estimators.plans.offload.session_cache import (
    DEQUANTISED_FIRST,
    PLAIN_BITS,
    Storage,
    longest_hot,
)
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.offload import (
    Disk,
    MeasuredStorage,
    OffloadPlan,
    Policy,
    PolicyRun,
    Pool,
    Restore,
    SizeRow,
    Speeds,
    Threshold,
    Times,
)
from memfit.estimators.results.terms import Basis
from memfit.estimators.runtimes.agent_memory import adaptive_chunk
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.runtime import comfortable_bytes
from memfit.estimators.sizing.estimate import ALONE, device_summary, limit_notes, notes_on_versions
from memfit.estimators.sizing.sized_model import SizedModel

# agent-memory, CACHE_HOT_THRESHOLD_TOKENS: 8192 tokens, which it counts as 200 MB.
FIXED_THRESHOLD = 8192
# Free space must be 1.2 times the bytes saved (agent-memory, design of the disk tier).
DISK_RESERVE = (6, 5)
LARGEST_CHUNK, SMALLEST_CHUNK = 4096, 512  # agent-memory's defaults
MAX_CONVERSATIONS = 10**6
_UNBOUNDED = 2**20
_NEVER_FULL = 2**62
_FIRST_ROW = 1024


class OffloadQuestion(Struct, frozen=True):
    """The conversations to plan for, and the memory and disk for them.

    Raises:
        InputError: when a count is out of range.
    """

    conversations: int
    tokens: int
    """Length of each conversation."""
    hot_bytes: int | None = None
    """Memory for conversations; None takes what the device leaves."""
    disk_bytes: int | None = None
    """Free disk space; None is unlimited."""
    speeds: Speeds = field(default_factory=Speeds)
    requests: tuple[TraceRequest, ...] = ()
    """A request trace to simulate, if any."""
    measured: MeasuredStorage | None = None
    """What was measured on the same machine, if anything."""
    warnings: tuple[Note, ...] = ()
    """About measurements that cannot be used."""

    def __post_init__(self) -> None:
        if not 1 <= self.conversations <= MAX_CONVERSATIONS:
            raise InputError(
                f"{self.conversations} conversations: give from 1 to {MAX_CONVERSATIONS}"
            )
        if self.tokens < 1:
            raise InputError("a conversation of 0 tokens: give at least 1")


def plan_offload(sized: SizedModel, storage: Storage, question: OffloadQuestion) -> OffloadPlan:
    """Return the plan; without a device or a budget it does not say what fits.

    Raises:
        InputError: for a request trace without a budget.
        UnsupportedError: when the runtime cannot run a conversation.
    """
    question = replace(question, speeds=question.speeds.or_measured(question.measured))
    return _OffloadPlan(sized, storage, question).answer()


class _OffloadPlan(Struct, frozen=True, dict=True):
    sized: SizedModel
    storage: Storage
    question: OffloadQuestion

    def answer(self) -> OffloadPlan:
        sized, storage, question, hot = self.sized, self.storage, self.question, self.hot_bytes
        stored = storage.stored_bytes(question.tokens)
        threshold = self._threshold()
        policies = tuple(self._policies(threshold))
        return OffloadPlan(
            model=sized.checkpoint.id,
            model_type=sized.model.model_type,
            runtime=runtime_summary(sized.runtime_model.runtime),
            device=device_summary(sized.device) if sized.device else None,
            conversations=question.conversations,
            tokens=question.tokens,
            bits=storage.bits,
            group_size=storage.group_size,
            layers=len(storage.buffers),
            state_bytes=storage.state_bytes,
            weight_bytes=sized.resident_bytes,
            active_bytes=self.active_bytes,
            hot_conversations=None if hot is None else min(question.conversations, hot // stored),
            pool=_pool(storage, hot),
            sizes=tuple(_size_row(storage, tokens, hot) for tokens in self._lengths()),
            restore=self._restore(),
            speeds=question.speeds,
            measured=question.measured,
            times=_times(stored, question),
            disk=_disk(stored, question),
            threshold=threshold,
            simulation=policies[0].simulation if policies else None,
            policies=policies,
            notes=tuple(self._notes()),
        )

    @cached_property
    def active_bytes(self) -> int:
        """The peak of the model with one active conversation."""
        return self.sized.requirement(Workload(prompt_tokens=self.question.tokens)).peak_bytes

    @cached_property
    def hot_bytes(self) -> int | None:
        """The given memory, else what 90 % of the working set leaves next to the active one."""
        if self.question.hot_bytes is not None or self.sized.device is None:
            return self.question.hot_bytes
        budget = comfortable_bytes(self.sized.device.working_set_bytes)
        return max(0, budget - self.active_bytes)

    @property
    def _most_tokens(self) -> int:
        return self.sized.model.max_context or _UNBOUNDED

    def _lengths(self) -> list[int]:
        most, requested = self._most_tokens, self.question.tokens
        lengths = {min(most, requested), requested}
        tokens = _FIRST_ROW
        while tokens <= most:
            lengths.add(tokens)
            tokens *= 2
        return sorted(lengths)

    def _restore(self) -> Restore:
        storage, question, device = self.storage, self.question, self.sized.device
        bulk, streaming = storage.restore(question.tokens, device or ANY_MAC)
        cpu_bulk, cpu_streaming = storage.restore(question.tokens, ANY_CPU)
        basis: Basis = "derived"
        found = question.measured
        if found and found.bulk_bytes is not None and found.streaming_bytes is not None:
            bulk, streaming, basis = found.bulk_bytes, found.streaming_bytes, "measured"
        others = (question.conversations - 1) * storage.stored_bytes(question.tokens)
        resident = self.sized.resident_bytes + min(others, self.hot_bytes or 0)
        limit = device.working_set_bytes if device else None
        return Restore(
            bulk_bytes=bulk,
            streaming_bytes=streaming,
            bulk_total_bytes=resident + bulk,
            streaming_total_bytes=resident + streaming,
            bulk_fits=None if limit is None else resident + bulk <= limit,
            streaming_fits=None if limit is None else resident + streaming <= limit,
            basis=basis,
            cpu_bulk_bytes=cpu_bulk,
            cpu_streaming_bytes=cpu_streaming,
        )

    def _threshold(self) -> Threshold:
        storage, hot, most = self.storage, self.hot_bytes, self._most_tokens
        conversations = self.question.conversations
        tokens = None if hot is None else longest_hot(storage, conversations, hot, most)
        return Threshold(
            tokens=tokens,
            fixed_tokens=FIXED_THRESHOLD,
            fixed_plain_bytes=storage.exact_bytes(FIXED_THRESHOLD, PLAIN_BITS),
            fixed_stored_bytes=storage.stored_bytes(FIXED_THRESHOLD),
        )

    def _policies(self, threshold: Threshold) -> Iterator[PolicyRun]:
        """Yield what happens to the requests with each policy, the reactive one first."""
        question, hot = self.question, self.hot_bytes
        if not question.requests:
            return
        if hot is None:
            raise InputError("a request trace needs a budget: give a device or --cache-budget")
        disk = question.disk_bytes
        tiers = Tiers(hot, _NEVER_FULL if disk is None else usable_disk(disk))
        most = threshold.tokens or FIXED_THRESHOLD
        kept: tuple[tuple[Policy, int | None], ...] = (
            ("reactive", None),
            ("proactive", 0),
            ("hybrid", most),
        )
        for policy, tokens in kept:
            run = simulate(
                question.requests, self.storage, tiers, question.speeds, most_kept=tokens
            )
            yield PolicyRun(policy, tokens or None, run)

    def _notes(self) -> Iterator[Note]:
        sized, storage, question, hot = self.sized, self.storage, self.question, self.hot_bytes
        yield from question.warnings
        longest = max((each.total_tokens for each in question.requests), default=0)
        yield from limit_notes(sized.model.max_context, max(question.tokens, longest))
        if sized.device and self.active_bytes > sized.device.working_set_bytes:
            text = "the model with one active conversation is larger than the working set"
            yield Note("warning", "too-large", text)
        elif hot is not None and hot < storage.stored_bytes(question.tokens):
            text = (
                "no further conversation of this length fits in memory with the active one:"
                " every request reads its conversation from disk"
            )
            yield Note("warning", "no-hot", text)
        yield from _format_notes(storage)
        if storage.bits != PLAIN_BITS and not sized.model.kv_quantizable:
            yield Note("info", "dequantised-first", DEQUANTISED_FIRST)
        if question.speeds.prefill is None:
            text = "no prefill speed: give one to compare a reload with prefill"
            yield Note("info", "no-prefill-speed", text)
        yield Note(
            "info",
            "memory-limit",
            "mx.set_memory_limit is a guideline, not a cap: the server has to enforce the budget",
        )
        alone = Workload(prompt_tokens=question.tokens)
        yield from notes_on_versions(sized, alone, of=ALONE)


def _size_row(storage: Storage, tokens: int, hot: int | None) -> SizeRow:
    stored = storage.stored_bytes(tokens)
    return SizeRow(
        tokens=tokens,
        plain_bytes=storage.exact_bytes(tokens, PLAIN_BITS),
        eight_bit_bytes=storage.exact_bytes(tokens, 8),
        four_bit_bytes=storage.exact_bytes(tokens, 4),
        blocks=storage.blocks(tokens),
        stored_bytes=stored,
        in_budget=None if hot is None else hot // stored,
        next_chunk_tokens=adaptive_chunk(tokens, largest=LARGEST_CHUNK, least=SMALLEST_CHUNK),
    )


def _pool(storage: Storage, hot: int | None) -> Pool | None:
    if hot is None or not storage.buffers:
        return None
    block = max(map(storage.block_bytes, storage.buffers))
    return Pool(hot, block, hot // block)


def _times(stored: int, question: OffloadQuestion) -> Times:
    save = milliseconds(stored, question.speeds.write)
    load = milliseconds(stored, question.speeds.read)
    prefill = milliseconds(question.tokens, question.speeds.prefill)
    faster = None
    if save is not None and load is not None and prefill is not None:
        faster = round(prefill / max(1, save + load), 1)
    return Times(save, load, prefill, faster)


def _disk(stored: int, question: OffloadQuestion) -> Disk:
    part, whole = DISK_RESERVE
    total = question.conversations * stored
    disk = question.disk_bytes
    return Disk(
        stored_bytes=total,
        with_reserve_bytes=ceil_div(total * part, whole),
        conversations=None if disk is None else usable_disk(disk) // stored,
    )


def usable_disk(disk_bytes: int) -> int:
    """Bytes that may be written so that the reserve stays free."""
    part, whole = DISK_RESERVE
    return disk_bytes * whole // part


def _format_notes(storage: Storage) -> Iterator[Note]:
    """Yield how the format treats layers that differ from plain keys and values."""
    quantises = storage.bits != PLAIN_BITS
    if storage.in_blocks and any(buffer.limit for buffer in storage.buffers):
        text = (
            "layers with a sliding window keep only its tokens; agent-memory counts all tokens for"
            " every layer"
        )
        yield Note("info", "windows", text)
    if quantises and storage.exact_buffers:
        text = (
            f"{storage.exact_buffers} of {len(storage.buffers)} layers are not quantised: mlx-lm"
            " does not quantise rotating caches and those inside a list, and MLX has no group for"
            " every width"
        )
        yield Note("info", "stored-exactly", text)
    if storage.state_bytes:
        text = (
            "recurrent states are not quantised and cannot be cut to a shorter prompt: a cached"
            " conversation helps only when the next prompt continues it"
        )
        yield Note("info", "states", text)
    widths = {width for each in storage.buffers for width in (each.key_dim, each.value_dim)}
    odd = sorted(width for width in widths if width % storage.group_size)
    if odd and quantises and storage.in_blocks:
        text = f"MLX cannot quantise rows of {odd[0]} in groups of {storage.group_size}"
        yield Note("warning", "groups", text)
