"""An estimate as data: what every renderer shows and no renderer computes."""

from typing import Annotated, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.units import (
    Bytes,
    Count,
    NonEmpty,
    Number,
    Positive,
    Tokens,
    one_of,
)
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.machine.device import Backend, DeviceSource
from memfit.estimators.results.advice import (
    Action,
    Alternative,
    FirstToken,
    Grid,
    ImageAdvice,
    PartialExperts,
    Recommendation,
    Recommended,
    StepSchedule,
)
from memfit.estimators.results.lazy import Lazy
from memfit.estimators.results.program_line import ProgramLine
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import (
    Basis,
    Level,
    LimitName,
    Method,
    PartName,
    Phase,
    Source,
    Verdict,
)

_WEAKEST_FIRST: tuple[Basis, ...] = ("assumed", "bound", "derived", "traced", "measured", "exact")


class Component(Struct, frozen=True):
    """Bytes of one kind."""

    bytes: Bytes
    basis: Basis
    """How far to trust them."""


class Weights(Component, frozen=True):
    """``bytes`` are of the checkpoint's tensors."""

    by_part: dict[PartName, Bytes]
    """Of the checkpoint; they add up to ``bytes``."""
    loaded_bytes: Bytes
    """Of the tensors that the runtime keeps, in the form it keeps them."""
    resident_bytes: Bytes
    """The same, as its allocator rounds them."""
    kept_by_part: dict[PartName, Bytes] | UnsetType = UNSET
    """What adds up to ``loaded_bytes``, where the runtime keeps a part of the experts."""


class KV(Component, frozen=True):
    """``bytes`` are allocated when the workload ends."""

    held_bytes: Bytes
    """Bytes of the tokens that are needed."""
    bytes_per_token: Bytes
    held_tokens: Tokens
    allocated_tokens: Tokens


class Workspace(Component, frozen=True):
    """Memory of intermediate results at the peak."""

    error_percent: Count
    """How far the figure has been from measurements (docs/accuracy.md)."""


class MemoryPool(Struct, frozen=True, kw_only=True):
    """How a runtime divides the memory that it takes at its start."""

    budget_bytes: Bytes
    weights_bytes: Bytes
    activation_bytes: Bytes
    """An upper bound."""
    graph_bytes: Bytes
    """CUDA graphs: a bound of their buffers, and the least that the runtime charges for each."""
    pool_bytes: Bytes
    """What is left for caches; 0 where nothing is."""
    block_bytes: Bytes
    """Bytes of one block of all layers together."""
    request_bytes: Bytes
    """Bytes of the blocks of one request of the workload."""
    tokens: Tokens
    """Tokens that the pool holds in requests of that length."""
    requests: Count
    """The most requests of that length at once."""
    draft_bytes: Bytes = 0
    """Weights of a draft model. It takes more of the pool, which is not described: the pool, its
    tokens and its requests are then upper bounds."""


class MemoryShare(Struct, frozen=True, kw_only=True):
    """What lies in one of the two memories that a runtime divides a model between."""

    name: Literal["GPU", "host"]
    layers: Count
    """Layers with their caches in it; their experts may be on the host."""
    weights_bytes: Bytes
    cache_bytes: Bytes
    state_bytes: Bytes
    compute_bytes: Bytes
    total_bytes: Bytes
    memory_bytes: Bytes | None
    """What there is of this memory; None where it is not known."""


class Components(Struct, frozen=True, omit_defaults=True):
    """What the memory is made of."""

    weights: Weights
    kv: KV
    ssm: Component
    workspace: Workspace
    margin: Component
    draft: Component | None = None
    """Everything a draft model adds."""


class ModelSummary(Struct, frozen=True):
    """The model as the estimate understood it."""

    id: str
    source: Source
    revision: str | None
    model_type: str
    parameters: Positive
    bits_per_weight: Number
    """Of the checkpoint's tensors; for display."""
    max_context: Positive | None
    layers: dict[str, Positive]
    assumed_from: str | UnsetType = UNSET
    """The config's own type, where ``model_type`` is assumed in its place."""


class RuntimeSummary(Struct, frozen=True):
    """The runtime with the allocation rules that were applied."""

    name: str
    version: str
    mlx_version: str | UnsetType = UNSET
    """The MLX with the rules that were applied, of a runtime that runs on it."""

    def __str__(self) -> str:
        """Return its name and version, and that of MLX."""
        mlx = "" if self.mlx_version is UNSET else f", MLX {self.mlx_version}"
        return f"{self.name} {self.version}{mlx}"


class MacosWorkingSet(Struct, frozen=True):
    """The working set of a Mac under one macOS."""

    macos: str
    working_set_bytes: Positive


class DeviceSummary(Struct, frozen=True):
    """The machine the verdict is about."""

    name: str
    backend: Backend
    memory_bytes: Positive
    working_set_bytes: Positive
    max_buffer_bytes: Positive | None
    source: DeviceSource
    used_by_others_bytes: Bytes | None = None
    has_host: bool = False
    """Whether the host has a memory of its own, which `MemoryShare` then has."""
    budget: str = "working set"
    """What ``working_set_bytes`` is: of ``--device host`` it can be the memory that is free now."""
    by_macos: tuple[MacosWorkingSet, ...] | UnsetType = UNSET
    """Of a Mac that is only named: the working set under each macOS that it runs."""


WeightDoubt = Literal[
    "already-quantised",
    "assumed-format",
    "dequantised",
    "file-sizes",
    "mismatch",
    "refused",
    "undeclared-format",
]
"""Codes of warnings that the weights may be others than those of the verdict."""


class Note(Struct, frozen=True):
    """Something the reader of a figure must know; ``code`` is stable."""

    level: Level
    code: str
    message: str


class Limit(Struct, frozen=True, kw_only=True):
    """What ends a run besides the bytes of all its buffers together."""

    name: Annotated[str, one_of("largest_buffer", "held_memory", "gpu_watchdog", "buffer_count")]
    unit: Annotated[str, one_of("bytes", "tokens", "buffers")]
    figure: Count
    """Of the workload, in ``unit``."""
    limit: Count
    """The largest figure that is known to pass."""
    verdict: Verdict
    """Of the figure: fits up to the limit, and ``beyond`` above it."""
    beyond: Verdict
    """Above the limit: exceeds where the run ends, tight where it may, unknown where that depends
    on the program, or on what is not known of the machine."""
    reason: str
    """What happens above the limit."""
    remedy: str = ""
    """What helps."""
    source: tuple[str, ...]
    """Where the limit was read, measured or reported."""


class DecodeSpeed(Struct, frozen=True, kw_only=True):
    """How fast tokens can be generated, all sequences together."""

    bytes_per_step: Positive
    """Bytes of weights and cache that a decode step reads at least."""
    bandwidth_bytes_per_second: Positive
    most_tokens_per_second: Number
    """An upper bound: bandwidth x batch / bytes."""
    expected_tokens_per_second: (
        Annotated[tuple[Number, ...], Meta(min_length=3, max_length=3)] | None
    )
    """The least, the usual and the most to expect of one sequence; None: the chip is not known."""
    range_tokens_per_second: Annotated[tuple[Number, ...], Meta(min_length=2, max_length=2)] | None
    """The least and the most of them."""
    host_bytes_per_step: Bytes | UnsetType = UNSET
    """The part of those bytes that is read from the memory of a GPU's host."""
    host_bandwidth_bytes_per_second: Positive | UnsetType = UNSET
    """Of that memory; ``bandwidth_bytes_per_second`` is then what both come to."""


class CurvePoint(Struct, frozen=True):
    """Memory at one context length, for plots."""

    context_tokens: Positive
    weights_bytes: Bytes
    cache_bytes: Bytes
    workspace_bytes: Bytes
    peak_bytes: Bytes


class FileChoice(Struct, frozen=True, kw_only=True):
    """One of the GGUF models of a repository."""

    name: str
    """What opens it, for figures of its own."""
    label: str
    """Its quantisation, or its file."""
    weights_bytes: Bytes
    """The size of its files: an upper bound of its weights."""
    needed_bytes: Bytes | None
    """With these weights; None where they are divided between two memories."""
    verdict: Verdict


class RunCall(Struct, frozen=True):
    """Memory over one call of a traced run."""

    phase: CallPhase
    tokens: Positive
    position: Count
    """Tokens in the cache when the call begins."""
    operations: Positive
    bytes: NonEmpty[Bytes]
    """The most in use during each of equal spans of its operations, in their order."""
    held_bytes: Bytes | UnsetType = UNSET
    """The most in use and kept for reuse together during the call."""


class RankFigures(Struct, frozen=True, kw_only=True):
    """What one of several ranks takes."""

    rank: Count
    device: str | None
    working_set_bytes: Positive | None
    first_layer: Count
    layers: Positive
    """Layers of which it has all or, with tensor parallelism, its part."""
    weights_bytes: Bytes
    """Of its arrays."""
    resident_bytes: Bytes
    """The same, as MLX's allocator rounds them."""
    kv_bytes: Bytes
    state_bytes: Bytes
    workspace_bytes: Bytes
    """At its peak, with the buffers that other ranks send to."""
    communication_bytes: Bytes
    """What MLX's ring keeps outside of MLX's allocator; part of the margin."""
    load_bytes: Bytes
    """The most in use while it loads its part."""
    prefill_bytes: Bytes | None
    decode_bytes: Bytes | None
    peak_bytes: Bytes
    needed_bytes: Bytes
    """The peak with the margin."""
    verdict: Verdict
    exceeded: tuple[LimitName, ...]


class OtherSplit(Struct, frozen=True, kw_only=True):
    """Another way to divide the layers among the ranks of a pipeline."""

    split: tuple[Positive, ...]
    even: bool
    """Whether mlx-lm's own programs split the layers so; no other one do they make."""
    verdict: Verdict
    """Of the rank with the worst one."""
    ranks: NonEmpty[RankFigures]


class AloneFigures(Struct, frozen=True, kw_only=True):
    """What the whole model needs on one of the machines."""

    device: str
    working_set_bytes: Positive
    needed_bytes: Bytes
    """The peak with the margin."""
    verdict: Verdict


class RankPlan(Struct, frozen=True, kw_only=True):
    """A model over several ranks."""

    parallel: Parallel
    split: tuple[Positive, ...] | None
    """In a pipeline, the layers of each rank."""
    even: bool
    """Whether mlx-lm splits the layers so by itself."""
    ranks: NonEmpty[RankFigures]
    other: OtherSplit | UnsetType = UNSET
    """In a pipeline over unlike machines, the split that leaves the most room; where ``split`` is
    not even, the even one."""
    alone: tuple[AloneFigures, ...] = ()
    """Each kind of machine that runs the model without the others."""


class Refusal(Struct, frozen=True):
    """Why the runtime does not load the checkpoint."""

    reason: str
    loaded_by: tuple[str, ...]
    """Runtimes that memfit knows to load it as it is."""


class Estimate(Lazy, Result, frozen=True, kw_only=True, tag="memfit.estimate/2"):
    """The answer of ``memfit estimate``."""

    model: ModelSummary
    workload: Workload
    runtime: RuntimeSummary
    device: DeviceSummary | None
    components: Components
    peak_bytes: Bytes
    peak_range_bytes: tuple[Bytes, Bytes]
    """The peak with its workspace wrong by ``error_percent``; of a bound, what is exact and all."""
    peak_phase: Phase
    needed_bytes: Bytes
    """The peak with the margin."""
    held_bytes: Bytes | UnsetType = UNSET
    """The most that MLX holds: in use, or freed and kept for reuse, where that is known."""
    held_phase: Phase | UnsetType = UNSET
    """The phase in which it does."""
    verdict: Verdict
    exceeded: tuple[LimitName, ...]
    recommendation: Recommendation
    recommended: Recommended
    actions: tuple[Action, ...]
    """Cheapest first."""
    best_action: Count | None
    """The place in ``actions`` of the one to take; None where nothing makes the request fit."""
    grid: Grid
    assumptions: tuple[str, ...]
    notes: tuple[Note, ...]
    limits: tuple[Limit, ...] = ()
    """What else may end the run, with its figure."""
    method: Method = "formula"
    refusal: Refusal | UnsetType = UNSET
    """Where the runtime does not load the checkpoint. Its figures are of the weights in the files,
    or where those are not all there, of the weights that the config describes."""
    decode_speed: DecodeSpeed | None = None
    """None where the chip of the device or the layers of the model are not known."""
    first_tokens: tuple[FirstToken, ...] | UnsetType = UNSET
    """Seconds to the first token: of the workload, and of other prompts in its place."""
    schedule: StepSchedule | UnsetType = UNSET
    """A falling schedule of prefill steps for a program that sets the step of each chunk, where the
    longest prompt takes a smaller step than the request's."""
    ranks: RankPlan | UnsetType = UNSET
    """Over several ranks: each of them. The other figures are of the one with the least room."""
    pool: MemoryPool | UnsetType = UNSET
    """Of a runtime that takes its memory at its start."""
    memories: tuple[MemoryShare, ...] | UnsetType = UNSET
    """Of a runtime with layers on a GPU and on the host: both; the peak is then the GPU's."""
    files: tuple[FileChoice, ...] | UnsetType = UNSET
    """The GGUF models of the repository, where none was named and this is of the usual one."""
    images: ImageAdvice | UnsetType = UNSET
    """Larger, more and smaller images, where the prompt has some and a machine is known."""
    partial_experts: PartialExperts | UnsetType = UNSET
    """Of a mixture that fits the machine with a part of its experts only."""
    curve: tuple[CurvePoint, ...] | UnsetType = UNSET
    """Memory at doubling prompt lengths, where plots were requested."""
    run: tuple[RunCall, ...] | UnsetType = UNSET
    """By trace: memory over the calls of the run."""
    curve_method: Literal["formula"] | UnsetType = UNSET
    """Given where the curve is not by the method of the estimate."""
    explanation: tuple[str, ...] | UnsetType = UNSET
    """Every formula with its numbers, where it was requested."""
    program: ProgramLine | UnsetType = UNSET
    """The command line of another program that it answers for, where one was given."""

    @property
    def fits(self) -> bool:
        """Whether it fits, if only just; False where no machine is known."""
        return self.verdict in ("fits", "tight")

    alternatives: tuple[Alternative, ...] | UnsetType = UNSET
    """Where no settings fit this Mac: other weights of the model that do, then other models."""

    @property
    def best(self) -> Action | None:
        """The action to take, None where nothing makes the request fit."""
        return None if self.best_action is None else self.actions[self.best_action]

    @property
    def doubts(self) -> tuple[Note, ...]:
        """The warnings that put the verdict itself in doubt."""
        return tuple(note for note in self.notes if note.code in get_args(WeightDoubt))

    @property
    def peak_basis(self) -> Basis:
        """The weakest basis of what the peak is made of."""
        parts = self.components
        made_of = (parts.weights, parts.kv, parts.ssm, parts.workspace, parts.draft)
        bases = {part.basis for part in made_of if part}
        return next(basis for basis in _WEAKEST_FIRST if basis in bases)
