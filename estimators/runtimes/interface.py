"""The core of a runtime: what a model takes under its rules. What only some have is a facet.

One file per runtime has its facts, a `Runtime`, and its rules, a subclass of `RuntimeModel` that
inherits the facets it has (runtimes/facets.py).
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.ranks import Rank
from memfit.estimators.base.units import open_limit, open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.kernels import PAGE, allocated
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Basis, PeakMoment, Phase
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import (
    Formula,
    Interpolated,
    MethodSetting,
    Recorded,
    Source,
)
from memfit.estimators.weights.footprint import WeightFootprint

if TYPE_CHECKING:
    from memfit.estimators.checkpoint.adapters import Adapter


Figure = Literal["weights", "cache", "workspace"]
Bound = TypeVar("Bound", bound="RuntimeModel")
Facet = TypeVar("Facet")


class MemoryFigures(Struct, frozen=True):
    """What one workload takes."""

    kv: KVCache
    ssm_bytes: int
    moment: PeakMoment
    """The largest moment."""
    host_bytes: int = 0
    """Bytes that the host holds, where the other figures are of a GPU alone."""
    cache_budget_bytes: int | None = None
    """Bytes that a budget of the cache has to hold, where they are not all of the cache."""

    def budgeted_bytes(self, runtime: Runtime) -> int:
        """Return the bytes that the runtime's own budget has to hold: the cache or everything."""
        if self.cache_budget_bytes is not None:
            return self.cache_budget_bytes
        return self.kv.nbytes if runtime.budget.for_cache else self.moment.nbytes


class DraftFigures(Struct, frozen=True):
    """What a draft model adds to the peak of a run."""

    nbytes: int
    basis: Basis
    phase: Phase | None = None
    """The phase of the largest moment with both models, None where it is not known."""
    explanation: str = "the draft model's own peak is added"
    host_bytes: int = 0
    """Bytes that the host holds of it, where ``nbytes`` are of a GPU alone."""
    workspace_bytes: int = 0
    """Bytes of the largest moment with both models that are neither weights nor caches, 0 where
    they are not known."""
    kept_bytes: int | None = None
    """The most freed bytes that MLX keeps beside the peak of both; None where not known."""


class Subject(Struct, frozen=True):
    """What a runtime is to run: a checkpoint as it was understood, and the machine."""

    checkpoint: Checkpoint
    model: Model
    footprint: WeightFootprint
    device: Device | None
    source: Formula | Interpolated | Recorded = Formula()
    """What describes the workspace of the model on MLX."""
    rank: Rank | None = None
    """The rank that has this part of the model, None: it is the whole model."""
    method: MethodSetting = "auto"
    adapter: "Adapter | None" = None
    has_decode: bool = True
    """Whether the calls after a prompt are among its moments; a formula may leave them out."""

    @property
    def backend(self) -> Backend:
        """The device's backend; Metal's rules when no device is given."""
        return self.device.backend if self.device else "metal"

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the weights as MLX's allocator rounds them."""
        sizes, backend = self.footprint.sizes, self.backend
        kept = sum(count * allocated(size, backend) for size, count in sizes.items())
        return kept + self.footprint.sliced_bytes


class Statements(NamedTuple):
    """What is said of a workload; each sentence is made when it is read."""

    assumptions: Iterable[str]
    """What an estimate assumes, with ``allocation``."""
    allocation: Iterable[str]
    """How the runtime allocates and what its figures leave open; nothing for mlx-lm."""
    notes: Iterable[Note]
    """Where the runtime's own answer or another method differs from the figures."""
    explanation: Iterable[str]
    """The lines that derive resident weights, caches and states."""


class RuntimeModel(Struct, frozen=True):
    """A model as one runtime runs it on one machine."""

    runtime: Runtime
    subject: Subject

    defaults: ClassVar[Runtime]
    """The runtime with the settings it has on its own."""
    _workspace_basis: ClassVar[tuple[Basis, int]] = ("bound", 0)
    """The basis of its workspace, and by how many percent a derived one has been wrong."""

    @property
    def source(self) -> Source:
        """What the figures follow from."""
        return self.subject.source

    @classmethod
    def loads(cls, checkpoint: Checkpoint) -> None:
        """Do nothing when the runtime loads the checkpoint, as it is or converted.

        Raises:
            UnsupportedError: when it does not.
        """

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> "RuntimeModel":
        """Return the model under the runtime with its settings.

        Raises:
            UnsupportedError: when the runtime cannot load or run it.
        """
        cls.loads(subject.checkpoint)
        return cls(runtime, subject)

    def on(self: Bound, device: Device | None) -> Bound:
        """Return the same on another machine."""
        return replace(self, subject=replace(self.subject, device=device))

    def facet(self, kind: type[Facet]) -> Facet | None:
        """Return a facet of the runtime, None where it has none of the kind."""
        return self if isinstance(self, kind) else None

    def resident_bytes(self) -> int:
        """Return the bytes of the weights as the runtime lays them out in memory."""
        return self.subject.footprint.loaded_bytes

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        raise NotImplementedError

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return what a figure rests on, and by how many percent it may be wrong."""
        if figure == "weights":
            return self.subject.footprint.basis, 0
        return self._workspace_basis if figure == "workspace" else ("exact", 0)

    def statements(self, workload: Workload, figures: MemoryFigures) -> Statements:
        """Return what is said of a workload and its figures."""
        return Statements(
            self._assumptions(workload),
            self._allocation(),
            self._notes(workload, figures),
            self._explanation(workload, figures),
        )

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        yield from self._premises()
        yield from self._allocation()

    def _premises(self) -> Iterator[str]:
        """Yield what was not read from the files and the command."""
        if self.subject.checkpoint.tensors is None:
            yield f"floating parameters are {self.subject.model.dtype}, from the config"

    def _allocation(self) -> Iterator[str]:
        yield f"{self.runtime.name}: {self.runtime.allocates}; keeps {self.runtime.keeps}"

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        device, budget = self.subject.device, self.runtime.budget
        needed = figures.budgeted_bytes(self.runtime)
        if device and budget.is_limit and needed > budget.of_device(device):
            what = "its cache" if budget.for_cache else "itself"
            text = (
                f"{self.runtime.name} gives {what} {open_limit(budget.of_device(device))},"
                f" this workload needs {open_size(needed)}"
            )
            yield Note("warning", "runtime-budget", text)

    def _explanation(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        footprint = self.subject.footprint
        yield (
            f"resident weights = {footprint.loaded_bytes} bytes, each of"
            f" {footprint.sizes.total()} arrays above {PAGE} bytes rounded up as the"
            f" {self.subject.backend} allocator does = {self.resident_bytes()} bytes"
        )
