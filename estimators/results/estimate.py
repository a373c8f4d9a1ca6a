"""An estimate as data: what every renderer shows and no renderer computes.

The fields mirror the JSON of ``memfit estimate --json`` (docs/schema/estimate.schema.json);
integers are bytes or tokens.
"""

from typing import Literal

from msgspec import Struct

Basis = Literal["exact", "traced", "derived", "measured", "bound"]
Verdict = Literal["fits", "tight", "exceeds", "unknown"]
Phase = Literal["load", "prefill", "decode"]
Level = Literal["info", "warning"]
State = Literal["change", "keep", "impossible", "not_applicable"]
Cost = Literal["none", "speed", "quality", "hardware"]

SCHEMA = "memfit.estimate/2"
_WEAKEST_FIRST: tuple[Basis, ...] = ("bound", "derived", "traced", "measured", "exact")


class Component(Struct, frozen=True):
    """Bytes of one kind, and how far to trust them."""

    bytes: int
    basis: Basis


class Weights(Component, frozen=True):
    """``bytes`` are of the checkpoint's tensors; ``loaded_bytes`` of those the runtime keeps,
    in the form it keeps them; ``resident_bytes`` the same as its allocator rounds them."""

    by_part: dict[str, int]
    loaded_bytes: int
    resident_bytes: int


class KV(Component, frozen=True):
    """``bytes`` are allocated when the workload ends, ``held_bytes`` are of tokens needed."""

    held_bytes: int
    bytes_per_token: int
    held_tokens: int
    allocated_tokens: int


class Workspace(Component, frozen=True):
    """``error_percent`` is how far the figure has been from measurements, docs/accuracy.md."""

    error_percent: int


class MemoryPool(Struct, frozen=True, kw_only=True):
    """How a runtime divides the memory that it takes at its start."""

    budget_bytes: int
    weights_bytes: int
    activation_bytes: int
    """An upper bound."""
    graph_bytes: int
    """CUDA graphs: a bound of their buffers, and the least that the runtime charges for each."""
    pool_bytes: int
    """What is left for caches; 0 where nothing is."""
    block_bytes: int
    """Bytes of one block of all layers together."""
    request_bytes: int
    """Bytes of the blocks of one request of the workload."""
    tokens: int
    """Tokens that the pool holds in requests of that length."""
    requests: int
    """The most requests of that length at once."""


class Components(Struct, frozen=True):
    """What the memory is made of; ``draft`` is everything a draft model adds."""

    weights: Weights
    kv: KV
    ssm: Component
    workspace: Workspace
    margin: Component
    draft: Component | None = None


class ModelSummary(Struct, frozen=True):
    """The model as the estimate understood it."""

    id: str
    source: str
    revision: str | None
    model_type: str
    parameters: int
    bits_per_weight: float  # of the checkpoint's tensors, for reading only
    max_context: int | None
    layers: dict[str, int]


class WorkloadSummary(Struct, frozen=True):
    """The workload the figures are for."""

    prompt_tokens: int
    max_tokens: int
    batch: int
    prefill_step: int
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    max_kv_size: int | None


class RuntimeSummary(Struct, frozen=True):
    """The runtime whose allocation rules were applied."""

    name: str
    version: str


class DeviceSummary(Struct, frozen=True):
    """The machine the verdict is about."""

    name: str
    backend: str
    memory_bytes: int
    working_set_bytes: int
    max_buffer_bytes: int | None
    source: str
    used_by_others_bytes: int | None = None


class Advice(Struct, frozen=True):
    """What to do with one setting; ``value`` is None only where there is nothing to set."""

    state: State
    value: int | None
    reason: str


class Recommendation(Struct, frozen=True, kw_only=True):
    """Each setting by the cheapest set of them that makes the request fit."""

    context_tokens: Advice
    """The longest prompt that fits, all else as requested."""
    prefill_step: Advice
    kv_bits: Advice
    weight_bits: Advice
    memory_bytes: Advice
    """Of the machine; a Mac's."""
    wired_limit_bytes: Advice
    """The limit that MLX is to set for `context_tokens`."""
    wired_limit_mb: Advice
    """The system setting iogpu.wired_limit_mb, in MiB, that makes room for the request."""
    basis: tuple[str, ...] = ()
    """What the figures rest on, where it is not the estimate alone."""

    def advice(self) -> dict[str, Advice]:
        """Return the advice of each setting, by its name."""
        names = (name for name in self.__struct_fields__ if name != "basis")
        return {name: getattr(self, name) for name in names}

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of all settings that apply, each after its name."""
        return (
            *self.basis,
            *(
                f"{NAMES[name]}: {advice.reason}"
                for name, advice in self.advice().items()
                if advice.state != "not_applicable"
            ),
        )


NAMES = {
    "context_tokens": "context",
    "prefill_step": "prefill step",
    "kv_bits": "KV bits",
    "weight_bits": "weight bits",
    "memory_bytes": "memory",
    "wired_limit_bytes": "wired limit",
    "wired_limit_mb": "iogpu.wired_limit_mb",
}
"""What people call each setting."""


class Action(Struct, frozen=True, kw_only=True):
    """Settings that make the request fit, or allow a longer prompt."""

    goal: Literal["request", "longer_prompt"]
    settings: dict[str, int]
    """Those to change, by the names of `Recommendation`; empty when nothing has to change."""
    commands: tuple[str, ...]
    """To paste into a shell; empty for a runtime without a command."""
    cost: Cost
    verdict: Verdict
    """Of the request with these settings."""
    peak_bytes: int
    needed_bytes: int
    """The peak with the margin."""
    context_tokens: int | None
    """The longest prompt that fits with these settings, 0 when none does; None: not searched."""


class Cell(Struct, frozen=True):
    """A row's settings at one column, with the largest prefill step that fits."""

    verdict: Verdict
    needed_bytes: int | None
    """The peak with the margin; None where the runtime cannot run it."""
    prefill_step: int
    reason: str = ""
    """Why the runtime cannot run it."""


class GridRow(Struct, frozen=True, kw_only=True):
    """Settings, and what they need at each column."""

    label: str
    settings: dict[str, int]
    """Those that differ from the request."""
    weights_bytes: int
    cells: tuple[Cell, ...]
    context_tokens: int
    """The longest prompt that fits, 0 when none does or no device is known."""
    context_step: int
    """The prefill step of that prompt."""


class LeftOut(Struct, frozen=True):
    """A row, a column or a setting that is not shown, and why."""

    what: str
    reason: str


class Grid(Struct, frozen=True):
    """What needs how much where; its columns are prompts, or Macs when no device is known."""

    axis: Literal["context_tokens", "memory_bytes"]
    columns: tuple[int, ...]
    rows: tuple[GridRow, ...]
    left_out: tuple[LeftOut, ...]
    method: Literal["formula", "trace", "measure"]


class Note(Struct, frozen=True):
    """Something the reader of a figure must know; ``code`` is stable."""

    level: Level
    code: str
    message: str


class DecodeSpeed(Struct, frozen=True, kw_only=True):
    """How fast tokens can be generated, all sequences together."""

    bytes_per_step: int
    """Bytes of weights and cache that a decode step reads at least."""
    bandwidth_bytes_per_second: int
    most_tokens_per_second: float
    """An upper bound: bandwidth x batch / bytes."""
    expected_tokens_per_second: tuple[float, ...] | None
    """The 10th percentile, median and 90th of what measured runs reach; None: never measured."""


class Estimate(Struct, frozen=True, kw_only=True):
    """The answer of ``memfit estimate``."""

    memfit_version: str
    model: ModelSummary
    workload: WorkloadSummary
    runtime: RuntimeSummary
    device: DeviceSummary | None
    components: Components
    peak_bytes: int
    peak_range_bytes: tuple[int, int]
    """The peak with its workspace wrong by ``error_percent``; of a bound, what is exact and all."""
    peak_phase: Phase
    needed_bytes: int
    """The peak with the margin."""
    verdict: Verdict
    exceeded: tuple[str, ...]
    recommendation: Recommendation
    actions: tuple[Action, ...]
    """Cheapest first."""
    grid: Grid
    assumptions: tuple[str, ...]
    notes: tuple[Note, ...]
    schema: str = SCHEMA
    method: str = "formula"
    decode_speed: DecodeSpeed | None = None
    """None where the chip of the device or the layers of the model are not known."""
    pool: MemoryPool | None = None

    @property
    def peak_basis(self) -> Basis:
        """The weakest basis of what the peak is made of."""
        parts = self.components
        made_of = (parts.weights, parts.kv, parts.ssm, parts.workspace, parts.draft)
        found = {part.basis for part in made_of if part}
        return next(basis for basis in _WEAKEST_FIRST if basis in found)


class CurvePoint(Struct, frozen=True):
    """Memory at one context length, for plots."""

    context_tokens: int
    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    peak_bytes: int


class RunCall(Struct, frozen=True):
    """Memory over one call of a traced run, which begins after ``position`` tokens.

    ``bytes`` are the most in use during each of equal spans of its operations, in their order.
    """

    phase: str
    tokens: int
    position: int
    operations: int
    bytes: tuple[int, ...]


class Plots(Struct, frozen=True):
    """What is plotted: memory against context, and where it was traced over the calls of a run.

    ``curve_method`` is given where the curve is not by the method of the estimate.
    """

    curve: tuple[CurvePoint, ...] = ()
    run: tuple[RunCall, ...] = ()
    curve_method: Literal["formula"] | None = None
