"""The interface of a runtime: what it takes for a model, by its own rules.

One file per runtime has its facts, a `Runtime`, and its rules, a subclass of `RuntimeModel`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.ranks import Parallel, Rank
from memfit.estimators.base.server_settings import ServerSettings
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.allocator import PAGE, allocated
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.results.estimate import MemoryPool, MemoryShare, Note, RunCall
from memfit.estimators.results.terms import Basis, Method, Phase
from memfit.estimators.runtimes.budget import HostNeed, recommended_bytes
from memfit.estimators.runtimes.expert_capacity import ExpertCapacity
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.weights.footprint import WeightFootprint
from memfit.estimators.workspace.peak import PeakMoment

if TYPE_CHECKING:
    from memfit.estimators.results.context import AutoContext
    from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile
    from memfit.estimators.runtimes.token_cost import TokenCost

Figure = Literal["weights", "cache", "workspace"]
Bound = TypeVar("Bound", bound="RuntimeModel")


class MemoryFigures(Struct, frozen=True):
    """What one workload takes."""

    kv: KVCache
    ssm_bytes: int
    moment: PeakMoment
    """The largest moment."""
    host_bytes: int = 0
    """What the host holds, where the other figures are of a GPU alone."""


class HostReads(NamedTuple):
    """What a decode step reads from the host's memory, and the bytes a second of it."""

    nbytes: int
    bandwidth_bytes: int


class DraftFigures(Struct, frozen=True):
    """What a draft model adds to the peak of a run."""

    nbytes: int
    basis: Basis
    phase: Phase | None = None
    """The phase of the largest moment with both models, None where it is not known."""
    explanation: str = "the draft model's own peak is added"
    host_bytes: int = 0
    """What the host holds of it, where ``nbytes`` are of a GPU alone."""
    workspace_bytes: int = 0
    """What of the largest moment with both models is neither weights nor caches, where known."""


class TracedPeak(Protocol):
    """The peak of any workload, from traces of a few."""

    def peak(
        self, workload: Workload, device: Device | None, versions: MlxVersions, kept_bytes: int
    ) -> PeakMoment:
        """Return the peak of a workload that keeps ``kept_bytes`` to its end."""

    def converted(self, quantize: Quantization) -> "TracedPeak":
        """Return the same of the model with its weights converted."""


class Subject(Struct, frozen=True):
    """What a runtime is to run: a checkpoint as it was understood, and the machine."""

    checkpoint: Checkpoint
    model: Model
    footprint: WeightFootprint
    device: Device | None
    traced: "TracedPeak | None" = None
    """The workspace on MLX of a model with operations that no formula has."""
    rank: Rank | None = None
    """The rank that has this part of the model, None: it is the whole model."""
    by_trace: bool | None = None
    """Whether the trace is asked for, where there is one; None: where no formula is."""
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


class RuntimeModel(Struct, frozen=True):
    """A model as one runtime runs it on one machine."""

    runtime: Runtime
    subject: Subject

    defaults: ClassVar[Runtime]
    """The runtime with the settings it has on its own."""
    method: ClassVar[Method] = "formula"
    on_mlx: ClassVar[bool] = False
    """Whether MLX's allocator has its memory, within MLX's wired limit."""
    runs_on_macs: ClassVar[bool] = True
    """Whether Macs are looked through for one that is large enough."""
    is_mlx_lm: ClassVar[bool] = False
    """Whether it is mlx-lm itself, which `memfit tune` measures."""
    takes_images: ClassVar[bool] = False
    """Whether its figures are of prompts with images too."""
    reply_tokens: ClassVar[int] = 0
    """Tokens that its printed program generates from one prompt where none are requested."""
    converter: ClassVar[str] = "mlx_lm.convert"
    """The program that converts a model for it."""
    by_mlx_lm: ClassVar[bool] = True
    """Whether mlx-lm's own function loads the files of a runtime on MLX."""
    loads_foreign_formats: ClassVar[bool] = False
    """Whether it loads formats of other programs that mlx-lm does not: where `bound` takes them."""
    loads_only_gguf: ClassVar[bool] = False
    """Whether another checkpoint has to be converted first."""
    workspace_basis: ClassVar[tuple[Basis, int]] = ("bound", 0)
    """The basis of its workspace, and by how many percent a derived one has been wrong."""

    @property
    def name(self) -> str:
        """The runtime's name."""
        return self.runtime.name

    @property
    def classes(self) -> str:
        """The library with the class of the model; the workspace follows its operations."""
        return "mlx-lm"

    @classmethod
    def configured(cls, environ: Mapping[str, str]) -> Runtime:
        """Return the runtime with the settings it takes from an environment.

        Raises:
            InputError: when it cannot read a variable.
        """
        return cls.defaults

    @classmethod
    def loads(cls, checkpoint: Checkpoint) -> None:
        """Do nothing when the runtime loads the checkpoint, as it is or converted.

        Raises:
            UnsupportedError: when it does not.
        """
        if cls.on_mlx and checkpoint.source == "gguf":
            raise UnsupportedError(
                f"{checkpoint.id}: {cls.defaults.name} loads no GGUF file; size it for llama.cpp,"
                " or convert it first"
            )

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> "RuntimeModel":
        """Return the model under the runtime with its settings.

        Raises:
            UnsupportedError: when the runtime cannot load or run it.
        """
        cls.loads(subject.checkpoint)
        return cls(runtime, subject)

    @classmethod
    def needs_trace(cls, subject: Subject) -> bool:
        """Whether no formula has a part of the model that the runtime loads."""
        return False

    @classmethod
    def token_costs(
        cls, model: Model, runtime: Runtime, workload: Workload
    ) -> tuple["TokenCost", ...]:
        """Return what the runtime caches for every token, equal layers together.

        Raises:
            UnsupportedError: when it has no such cache.
        """
        raise NotImplementedError

    def on(self: Bound, device: Device | None) -> Bound:
        """Return the same on another machine."""
        return replace(self, subject=replace(self.subject, device=device))

    def parallel(self, asked: Parallel | None) -> Parallel:
        """Return how the runtime runs the model over several ranks.

        Raises:
            UnsupportedError: when it does not, or not as it is ``asked``.
        """
        raise UnsupportedError(
            f"{self.name}: several ranks are described for mlx-lm, which mlx.launch starts"
        )

    def of_rank(self: Bound, rank: Rank) -> Bound:
        """Return the part of one rank; call `parallel` first.

        Raises:
            InputError: for a split that is not of the model's layers.
            UnsupportedError: when the model does not divide among the ranks.
        """
        raise NotImplementedError

    @property
    def load_bytes(self) -> int:
        """The most bytes in use while the weights are loaded."""
        return self.resident_bytes

    @property
    def kept_experts(self) -> ExpertCapacity | None:
        """The experts of each layer that it keeps in memory, None where that is all of them."""
        return None

    @property
    def most_load_bytes(self) -> int:
        """What the load takes at most, 0 where the speeds of disk and GPU do not decide it."""
        return 0

    @property
    def communication_bytes(self) -> int:
        """Bytes outside of MLX's allocator for the exchange with other ranks."""
        return 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights as the runtime lays them out in memory."""
        return self.subject.allocated_bytes if self.on_mlx else self.subject.footprint.loaded_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the tensors that the runtime keeps."""
        return self.subject.footprint.loaded_bytes

    @property
    def kept_by_part(self) -> Mapping[str, int] | None:
        """Bytes that it keeps of each part, where it leaves a part of the experts on disk."""
        return None

    @property
    def unloaded_bytes(self) -> int:
        """Bytes of the checkpoint's tensors that the runtime does not keep."""
        return self.subject.footprint.unloaded_bytes

    @property
    def refusal(self) -> str:
        """Why the runtime does not load the checkpoint; empty where nothing is known against it.

        The strict load of mlx-lm (mlx_lm/utils.py, load_model) is that of everything on MLX.
        """
        checkpoint = self.subject.checkpoint
        # Of an assumed type the class is not known, nor what it takes.
        if not self.on_mlx or checkpoint.assumed_from:
            return ""
        if checkpoint.has_other_names and self.by_mlx_lm:
            return "mlx-lm loads only model*.safetensors, and the weights are in other files"
        if checkpoint.config.get("model_file") is not None and self.by_mlx_lm:
            return "model_file in the config: mlx-lm runs no code of a model unless it is trusted"
        return self.subject.footprint.refusal

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        raise NotImplementedError

    def least_bytes(self, workload: Workload) -> int:
        """Return a part of what a workload takes that is cheap to compute.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        return self.resident_bytes

    def runs_kv_bits(self, workload: Workload) -> bool:
        """Whether it quantises the cache of such a workload; ``figures`` rejects single bits."""
        return True

    def is_alike_on(self, device: Device | None) -> bool:
        """Whether figures on another machine are the same: its GPU is of the same kind."""
        own = self.subject.device
        return own is not None and device is not None and own.gpu == device.gpu

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        """Return commands for a shell that run a model with the settings of a workload.

        ``server`` are the flags of mlx_lm.server that fit, None where it does not.
        """
        return ()

    def drafted(self, workload: Workload, draft: "RuntimeModel", tokens: int) -> DraftFigures:
        """Return what a draft model adds that proposes ``tokens`` in each step.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        return DraftFigures(draft.figures(workload).moment.nbytes, "bound")

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return what a figure rests on, and by how many percent it may be wrong."""
        if figure == "weights":
            return self.subject.footprint.basis, 0
        return self.workspace_basis if figure == "workspace" else ("exact", 0)

    def budgeted_bytes(self, figures: MemoryFigures) -> int:
        """Return what the runtime's own budget has to hold: the cache or everything."""
        return figures.kv.nbytes if self.runtime.budget.for_cache else figures.moment.nbytes

    def formula_view(self) -> "RuntimeModel":
        """Return what answers many workloads quickly."""
        return self

    def phases_view(self, _: frozenset[CallPhase]) -> "RuntimeModel":
        """Return what may leave out the calls of other phases, if that is quicker."""
        return self

    def comparing(self, *_: Workload) -> "RuntimeModel":
        """Return what answers for all these workloads in one way, so that peaks compare."""
        return self

    def assumptions(self, workload: Workload, units: Units) -> Iterator[str]:
        """Yield what an estimate assumes."""
        if self.subject.checkpoint.tensors is None:
            yield f"floating parameters are {self.subject.model.dtype}, from the config"
        if self.subject.device is None and self.on_mlx:
            yield (
                "no device is named: the workspace follows MLX's rules for a Metal GPU of Max class"
            )
        yield from self.allocation_rules()

    def allocation_rules(self) -> Iterator[str]:
        """Yield how the runtime allocates and what its figures leave open; nothing for mlx-lm."""
        if self.is_mlx_lm:
            return
        yield f"{self.name}: {self.runtime.allocates}; keeps {self.runtime.keeps}"
        if self.on_mlx:
            yield f"the workspace follows the operations of {self.classes}'s class of this model"
        else:
            yield "the workspace is a bound by the widest layer, without what kernels add to it"
        if self.loads_only_gguf and self.subject.checkpoint.source != "gguf":
            yield f"{self.name} loads GGUF files: a conversion's weights will have other sizes"

    def notes(self, workload: Workload, figures: MemoryFigures, units: Units) -> Iterator[Note]:
        """Yield where the runtime's own answer or another method differs from the figures."""
        device, budget = self.subject.device, self.runtime.budget
        needed = self.budgeted_bytes(figures)
        if device and budget.is_limit and needed > budget.of_device(device):
            what = "its cache" if budget.for_cache else "itself"
            text = (
                f"{self.name} gives {what} {format_bytes(budget.of_device(device), units)},"
                f" this workload needs {format_bytes(needed, units)}"
            )
            yield Note("warning", "runtime-budget", text)
        if device and device.backend == "metal" and not self.runs_on_macs:
            text = f"{self.name} is described for NVIDIA GPUs; what it does on a Mac is not known"
            yield Note("warning", "not-on-macs", text)

    def explain(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        """Yield the lines that derive resident weights, caches and states."""
        footprint = self.subject.footprint
        yield (
            f"resident weights = {footprint.loaded_bytes} bytes, each of"
            f" {footprint.sizes.total()} arrays above {PAGE} bytes rounded up as the"
            f" {self.subject.backend} allocator does = {self.resident_bytes} bytes"
        )

    def run_calls(self, workload: Workload) -> tuple[RunCall, ...]:
        """Return the memory over each call of a run, for a plot; nothing without a trace."""
        return ()

    def memory_profile(self, workload: Workload, figures: MemoryFigures) -> "RuntimeMemoryProfile":
        """Return fixed bytes and bytes a token, as they are at the workload."""
        from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile

        return RuntimeMemoryProfile(
            fixed_device_local_bytes=figures.ssm_bytes + figures.moment.workspace_bytes,
            fixed_host_visible_bytes=0,
            device_local_bytes_per_token=figures.kv.bytes_per_token * workload.batch,
            host_visible_bytes_per_token=0,
            gpu_ssm_bytes=figures.ssm_bytes,
        )

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> "AutoContext":
        """Return the context that the runtime chooses by itself, and the right one.

        ``most`` is the longest that the model and its settings allow, ``longest`` the longest that
        fits the device.
        """
        from memfit.estimators.results.context import AutoContext

        return AutoContext(self.runtime.budget.of_device(device), None, longest)

    def settled(self, workload: Workload) -> Runtime:
        """Return the runtime with the settings that it chooses by a workload.

        Raises:
            UnsupportedError: when it cannot choose.
        """
        return self.runtime

    def memories(self, workload: Workload) -> tuple[MemoryShare, ...]:
        """Return what is on the GPU and what on the host, where figures are the GPU's alone."""
        return ()

    def shared_bytes(self, figures: MemoryFigures) -> int:
        """Return what GPU and host need of one memory, 0 where figures are of all of it."""
        return 0

    def host_need(self, nbytes: int) -> HostNeed | None:
        """Return what holding ``nbytes`` means for the host, None where it has no own memory.

        Raises:
            InputError: when a host is described and there is none.
        """
        return None

    def divisions(self) -> Iterator[Sequence[tuple[dict[str, int], Runtime]]]:
        """Yield ways to divide the model between a GPU and its host, the fastest way first.

        Each has settings with the most on the GPU first, by their names and as a runtime; nothing
        where the runtime does not divide a model, or its settings say how.
        """
        return iter(())

    def host_reads(self, workload: Workload) -> HostReads | None:
        """Return what a decode step reads from the host, None where it has no own memory."""
        return None

    def pool(self, workload: Workload, *, draft_bytes: int = 0) -> MemoryPool | None:
        """Return how the runtime divides a device's memory, where it does so at its start.

        ``draft_bytes`` are of the weights of a draft model.
        """
        return None

    def is_grouped(self, workload: Workload) -> bool:
        """Whether the runtime prefills a batch in groups."""
        return False

    def decoding_rows(self, workload: Workload) -> int:
        """Return the most sequences of a batch that decode together."""
        return workload.batch

    @property
    def context_limit(self) -> int | None:
        """The tokens beyond which the runtime fails whatever the memory, None where it has none."""
        return None

    def cache_budget_bytes(self, workload: Workload) -> int | None:
        """Return what caches may take of the device: without a pool, all but the weights.

        None without a device.
        """
        device, budget = self.subject.device, self.runtime.budget
        if device is None:
            return None
        if pool := self.pool(workload):
            return pool.pool_bytes
        left = max(0, recommended_bytes(budget, device) - self.resident_bytes)
        return min(left, budget.of_device(device)) if budget.for_cache else left

    def context_notes(
        self, workload: Workload, figures: MemoryFigures, units: Units
    ) -> Iterator[Note]:
        """Yield what a plan of contexts must say of the runtime."""
        return iter(())
