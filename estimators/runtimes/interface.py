"""The core of a runtime: what is known of it, and what a model takes under its rules.

One file per runtime has its facts, a `Runtime`, and its rules, a subclass of `RuntimeModel` that
inherits the facets it has (runtimes/facets.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.ranks import Rank
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import Count, NonEmpty, Positive, Tokens, open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.kernels import PAGE, allocated
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.mlx.versions import MLX_LM_VERSION, MLX_VERSION, MlxVersions
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.growth import Growth
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Basis, PeakMoment, Phase
from memfit.estimators.runtimes.source import Formula, Interpolated, MethodSetting, Source
from memfit.estimators.weights.footprint import WeightFootprint

if TYPE_CHECKING:
    from memfit.estimators.checkpoint.adapters import Adapter

Charges = Literal["its own caches", "attention layers", "every layer"]
Limited = Literal["working_set", "working_set_for_cache", "memory", "cache"]


# The runtimes of settings that are not llama.cpp's.
_OWNERS = {"kv_cache_dtype": "vllm", "gpu_memory_utilization": "vllm", "capacity": "mlx-moe"}


class Budget(Struct, frozen=True):
    """The memory that a runtime gives itself."""

    of: Limited
    """The memory the share is of, and whether it is for everything or for the cache alone."""
    share: Count = 100
    """Percent of that memory."""
    bytes: Positive | None = None
    """A fixed size, in place of a share."""

    def of_device(self, device: Device) -> int:
        """Return the budget in bytes."""
        if self.bytes is not None:
            return self.bytes
        whole = device.memory_bytes if self.of == "memory" else device.working_set_bytes
        return whole * self.share // 100

    @property
    def is_taken(self) -> bool:
        """Whether the runtime takes it in any case, and leaves the rest free."""
        return self.of == "memory"

    @property
    def for_cache(self) -> bool:
        """Whether it limits the cache alone."""
        return self.of in ("cache", "working_set_for_cache")

    @property
    def is_limit(self) -> bool:
        """Whether nothing runs above it.

        A share of the working set ends no run: mlx-lm warns above its own, mlx-moe chooses experts
        by it and zinc a context. All of them run up to the whole.
        """
        return self.of != "working_set"


class MemoryShare(Budget, frozen=True):
    """A share of the memory that need not be a whole number of percent."""

    percent: Fraction = Fraction(100)

    def of_device(self, device: Device) -> int:
        return int(device.memory_bytes * self.percent // 100)


class Runtime(Struct, frozen=True, kw_only=True):
    """A runtime with its settings; all counts are tokens."""

    name: str
    version: str
    """The version or commit its rules were read in."""
    prefill_step: Positive
    """Tokens computed at once: a chunk of mlx-lm, a micro-batch of llama.cpp."""
    kv_step: Count
    """What the capacity of a cache is a multiple of."""
    kv_group_size: Count
    quantized_kv_start: Tokens
    growth: Growth
    """How a cache gets room for more tokens (runtimes/growth.py)."""
    charges: Charges
    """The layers that it keeps a cache for."""
    budget: Budget
    keeps: str
    """What it keeps in which memory, in words."""
    allocates: str
    """How it allocates its cache, in words."""
    source: str
    mlx_version: tuple[Count, ...] = ()
    """Empty for a runtime without MLX, and where it is not known."""
    mlx_lm_version: tuple[Count, ...] = ()
    """Of the classes that it runs; empty where it is not known."""
    batch: Count = 0
    """Tokens of a batch, which has several micro-batches; 0 where there is no such thing."""
    kv_bits: Positive | None = None
    """The bits of its cache unless others are set."""
    cache_dtype: Literal["F16", "F32"] | None = None
    """The element type of its cache; None for that of the activations."""
    kv_initial: Count = 0
    """The first capacity of a cache that doubles."""
    least_prefill_step: Count = 0
    context_step: Count = 1
    """What the context that it chooses by itself is a multiple of."""
    shares_prefix: bool = False
    """Whether sessions with the same beginning share its full pages."""
    max_context: Positive | None = None
    """A limit that the runtime was set to."""
    faults: tuple[str, ...] = ()
    """What is wrong in its own answers; memfit shows its answer and the right one."""

    def configured(self, environ: Mapping[str, str]) -> "Runtime":
        """Return the runtime with the settings it takes from an environment.

        Raises:
            InputError: when it cannot read a variable.
        """
        return self

    def on(self, device: Device | None) -> "Runtime":
        """Return the runtime with the defaults that it has on a device."""
        return self

    def with_setting(self, name: str, value: Any) -> "Runtime":
        """Return the runtime with a setting of its own, from a value or a text.

        Raises:
            InputError: when it has no such setting, or the value cannot be read.
        """
        if name == "gpu_memory_utilization" and self.budget.of == "memory":
            return replace(self, budget=MemoryShare("memory", int(value), None, value))
        runtime, owner = setting("runtime"), _OWNERS.get(name, "llama.cpp")
        other = f", or {setting('kv_bits')} 8" if name == "kv_cache_dtype" else ""
        raise InputError(
            f"{self.name} has no such setting; give {runtime} {owner}, which has it{other}"
        )

    @property
    def versions(self) -> MlxVersions:
        """The versions of MLX and mlx-lm with the rules that it follows."""
        return MlxVersions(self.mlx_version or MLX_VERSION, self.mlx_lm_version or MLX_LM_VERSION)


class RuntimeTable(Result, frozen=True, kw_only=True, tag="memfit.runtimes/2"):
    """The answer of ``memfit runtimes``."""

    runtimes: NonEmpty[Runtime]


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


class Subject(Struct, frozen=True):
    """What a runtime is to run: a checkpoint as it was understood, and the machine."""

    checkpoint: Checkpoint
    model: Model
    footprint: WeightFootprint
    device: Device | None
    source: Formula | Interpolated = Formula()
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
                f"{self.runtime.name} gives {what} {open_size(budget.of_device(device))},"
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
