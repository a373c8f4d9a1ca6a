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

SCHEMA = "memfit.estimate/1"
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


class Recommendation(Struct, frozen=True):
    """Settings that follow from the figures; None where nothing fits or nothing applies."""

    context_tokens: int | None = None
    wired_limit_bytes: int | None = None
    prefill_step: int | None = None
    kv_bits: int | None = None
    expert_capacity: int | None = None
    reasons: tuple[str, ...] = ()


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
    peak_phase: Phase
    verdict: Verdict
    exceeded: tuple[str, ...]
    recommendation: Recommendation
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
