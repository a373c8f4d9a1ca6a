"""mlx-moe: mlx-lm with as many experts in memory as fit its share of the working set."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.model import Part
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.reading.section import number_or_text
from memfit.estimators.base.units import Positive, open_size, parse_count
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.expert_capacity import BUDGET, expert_capacity, whole_slots
from memfit.estimators.runtimes.facets import ExpertCapacity, LoadedWeights, OwnWeights, PerMachine
from memfit.estimators.runtimes.held import without_held
from memfit.estimators.runtimes.interface import MemoryFigures, RuntimeModel, Subject
from memfit.estimators.runtimes.mlx_lm import MlxModel
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.weights.expert_slots import (
    LOOKUP_BYTES,
    inventory,
    require_capacity,
    startup_bytes,
)


class MlxMoeRuntime(Runtime, frozen=True, kw_only=True):
    """mlx-moe with the number of experts that its option gives."""

    capacity: Positive | None = None
    """Experts of each layer; None: as many as fit."""

    def with_setting(self, name: str, value: Any) -> Runtime:
        if name != "capacity":
            return Runtime.with_setting(self, name, value)
        return replace(self, capacity=number_or_text(parse_count)(value))


MLX_MOE = MlxMoeRuntime(
    name="mlx-moe",
    version="307be150",
    prefill_step=2048,  # it runs mlx_lm.stream_generate
    kv_step=256,
    kv_group_size=64,  # mlx_moe/server.py
    quantized_kv_start=0,  # mlx_moe/server.py
    growth="steps",
    charges="its own caches",
    budget=Budget("working_set", BUDGET[0]),
    keeps="experts that do not fit on disk, everything else in unified memory",
    allocates="caches as mlx-lm's; experts as many a layer as fit in 71 % of the working set",
    source="https://github.com/mu-hashmi/mlx-moe, mlx_moe/server.py and lazy_experts",
    faults=(
        "its capacity divides decimal megabytes by 1024, so that experts count 2.4 % too small",
    ),
)


class MlxMoe(MlxModel, OwnWeights, PerMachine, frozen=True):
    """mlx-moe, for a model with the same number of experts in every layer that has them."""

    runtime: MlxMoeRuntime

    experts: int = 0
    """Of one layer."""
    layers: int = 0
    """Those with experts."""

    defaults = MLX_MOE

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> RuntimeModel:
        cls.loads(subject.checkpoint)
        counts = [block.experts for block in subject.model.experts().values()]
        footprint = subject.footprint
        has_experts = footprint.by_part[Part.EXPERTS.value] and footprint.basis != "bound"
        if len(set(counts)) != 1 or not has_experts:
            raise UnsupportedError(
                f"{subject.checkpoint.id}: mlx-moe needs the same number of experts in every layer"
                " that has them"
            )
        assert isinstance(runtime, MlxMoeRuntime)
        if runtime.capacity is not None:
            top_k = max(block.top_k for block in subject.model.experts().values())
            require_capacity(runtime.capacity, counts[0], top_k)
        return cls(runtime, subject, counts[0], len(counts))

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes; when it clears MLX's cache is not known."""
        return without_held(super().figures(workload))

    def resident_bytes(self) -> int:
        """Return the weights with the experts that are kept, and the table that finds them."""
        return self.subject.allocated_bytes - self._expert_bytes + self._kept_bytes

    def loaded_weights(self) -> LoadedWeights:
        """Return the same, before its allocator rounds them.

        By part, the table that finds experts counts to them.
        """
        footprint, (kept, _) = self.subject.footprint, self._capacities()
        loaded = footprint.loaded_bytes - self._expert_bytes + self._kept_bytes
        parts = {part.value: footprint.kept(part) for part in Part}
        parts[Part.EXPERTS.value] = self._kept_bytes
        # What the load makes of other weights is not known by part.
        is_known = sum(parts.values()) == loaded
        return LoadedWeights(
            loaded_bytes=loaded,
            unloaded_bytes=footprint.unloaded_bytes,
            by_part=parts if is_known else None,
            experts=ExpertCapacity(kept, self.experts, self._bytes_of(kept)),
        )

    def load_bytes(self) -> int:
        """Return the start-up: the kept experts are copied out of whole files."""
        kept, _ = self._capacities()
        subject = self.subject
        experts = inventory(subject.model, subject.checkpoint.tensors, subject.footprint)
        return startup_bytes(experts, [kept] * self.layers) + experts.lookup_bytes

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield the capacity, and mlx-moe's own where it is another."""
        right, its_own = self._capacities()
        size = open_size(self._bytes_of(right))
        text = f"mlx-moe keeps {right} of {self.experts} experts a layer: {size}"
        yield Note("info", "expert-capacity", text)
        if its_own != right:
            size = open_size(self._bytes_of(its_own - right))
            text = (
                f"mlx-moe's own capacity is {its_own}, {size} more than 71 % of the working set"
                " allows: it divides decimal megabytes by 1024"
            )
            yield Note("warning", "runtime-fault", text)

    @property
    def _expert_bytes(self) -> int:
        return self.subject.footprint.by_part[Part.EXPERTS.value]

    @property
    def _kept_bytes(self) -> int:
        kept, _ = self._capacities()
        return self._bytes_of(kept) + self.layers * self.experts * LOOKUP_BYTES

    def _bytes_of(self, capacity: int) -> int:
        return capacity * self._expert_bytes // self.experts

    def _capacities(self) -> tuple[int, int]:
        """The capacity by integers, and by mlx-moe's code (select_capacity)."""
        device = self.subject.device
        if self.runtime.capacity is not None:
            return self.runtime.capacity, self.runtime.capacity
        if device is None:
            return self.experts, self.experts
        other = self.subject.footprint.loaded_bytes - self._expert_bytes
        right = expert_capacity(
            working_set_bytes=device.working_set_bytes,
            other_bytes=other,
            expert_bytes=self._expert_bytes,
            experts=self.experts,
        ).experts
        room = max(0, self.runtime.budget.of_device(device) - other)
        its_own = whole_slots(room * 1024 * self.experts // (1000 * self._expert_bytes))
        return right, min(self.experts, its_own)
