"""What `memfit plan offload` computes of the caches that are measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.plans.offload.cache_tiers import Tiers, simulate
from memfit.estimators.plans.offload.session_cache import (
    BLOCK_TOKENS,
    PLAIN_BITS,
    STORED_BITS,
    Storage,
    storage_of,
)
from memfit.estimators.results.offload import Simulation, Speeds
from memfit.estimators.runtimes.measurement import Way
from memfit.estimators.runtimes.runtime import Need
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.difference_report import model_line, report_lines
from memfit.probes.prompt_caches.result import Conversation

_GROUP_SIZE = 64
COUNTED = (
    *("requests", "agents", "hot", "warm", "cold", "new", "prefill_tokens", "saved_tokens"),
    *("largest_hot_bytes", "largest_disk_bytes"),
)
"""Figures of a simulation that a real run has to repeat; files have a header in addition."""


class CachePlan(Struct, frozen=True):
    """A model as it is estimated on the machine of the measurement."""

    sized: SizedModel
    device: Device
    prefill_step: int

    def storage(self, bits: int) -> Storage | None:
        """Return how caches are stored in some bits, None where that is not planned."""
        if bits not in STORED_BITS:
            return None
        try:
            return storage_of(
                self.sized.model, bits=bits, group_size=_GROUP_SIZE, prefill_step=self.prefill_step
            )
        except UnsupportedError:
            return None

    def held_bytes(self, tokens: int, bits: int) -> int | None:
        """Return the bytes of a stored cache."""
        storage = self.storage(bits)
        return storage.stored_bytes(tokens) if storage else None

    def peak_bytes(self, tokens: int, bits: int, way: Way) -> int | None:
        """Return the peak of a restore, a bound for those that dequantise."""
        storage = self.storage(bits)
        if storage is None:
            return None
        if way == "as-stored":
            return storage.stored_bytes(tokens)
        bulk, streaming = storage.restore(tokens, self.device)
        return bulk if way == "bulk" else streaming

    def simulation(
        self,
        requests: Sequence[TraceRequest],
        bits: int,
        room: Tiers,
        speeds: Speeds,
        most_kept: int | None,
    ) -> Simulation | None:
        """Return what happens to requests of conversations; a longer one leaves memory at once."""
        storage = self.storage(bits)
        if storage is None:
            return None
        return simulate(requests, storage, room, speeds, most_kept=most_kept)

    def largest(self, requests: Sequence[TraceRequest]) -> Workload:
        """Return the request with most tokens, as one that is computed from the start."""
        most = max(requests, key=lambda each: each.total_tokens)
        return Workload(
            prompt_tokens=most.prompt_tokens,
            max_tokens=most.completion_tokens,
            prefill_step=self.prefill_step,
        )

    def serving(self, requests: Sequence[TraceRequest], all_bits: Iterable[int]) -> Need:
        """Return the most that the active one of several conversations needs, with the weights.

        That is to compute it from the start, or to restore or quantise it.
        """
        largest = self.largest(requests)
        need, tokens = self.sized.requirement(largest), largest.total_tokens
        plain = self.held_bytes(tokens, PLAIN_BITS) or 0
        moved = (
            max(plain + storage.stored_bytes(tokens), *storage.restore(tokens, self.device))
            for storage in map(self.storage, all_bits)
            if storage
        )
        around = self.sized.resident_bytes + self.sized.margin_bytes
        return replace(need, peak_bytes=max(need.peak_bytes, around + max(moved, default=0)))

    def active_bytes(self, requests: Sequence[TraceRequest], bits: int) -> int:
        """Return the same of conversations in some bits, without the weights and the margin."""
        need = self.serving(requests, (bits,))
        return need.peak_bytes - self.sized.resident_bytes - self.sized.margin_bytes

    def kept_bytes(self, requests: Sequence[TraceRequest], all_bits: Iterable[int]) -> int:
        """Return what the conversations take when all of them stay in memory, at most."""
        longest: dict[str, int] = {}
        for request in requests:
            longest[request.agent] = max(request.total_tokens, longest.get(request.agent, 0))
        # Several turns leave at most a block more room than one.
        lengths = [tokens + BLOCK_TOKENS for tokens in longest.values()]
        return max(
            sum(self.held_bytes(tokens, bits) or 0 for tokens in lengths) for bits in all_bits
        )

    def differences(
        self, conversations: Sequence[Conversation], versions: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return lines to paste into an issue, none when everything is as planned."""
        model = f"{model_line(self.sized)}, prefill step {self.prefill_step}"
        return report_lines(versions, model, _differences(conversations))


def simulated_differences(planned: Simulation, measured: Simulation) -> tuple[str, ...]:
    """Return each figure that is counted otherwise than it is planned."""
    return tuple(
        f"{name}: {getattr(planned, name)} planned, {getattr(measured, name)} measured"
        for name in COUNTED
        if getattr(planned, name) != getattr(measured, name)
    )


def _differences(conversations: Sequence[Conversation]) -> Iterator[str]:
    for each in conversations:
        for file in each.stored:
            what = f"{each.tokens} tokens in {file.bits} bits"
            if file.planned_held_bytes not in (None, file.held_bytes):
                yield f"{what}: planned {file.planned_held_bytes} bytes, held {file.held_bytes}"
            # An older file may have been stored with other prefill steps.
            for restore in file.restores if file.write_ns is not None else ():
                planned, peak = restore.planned_peak_bytes, restore.peak_bytes
                if planned is not None and peak is not None and peak > planned:
                    yield f"{what}, {restore.way}: planned {planned} bytes, peak {peak}"
