"""Runtimes beside mlx-lm and llama.cpp: what they take, and where their own rules go wrong."""

from collections.abc import Iterator
from dataclasses import field, replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Part
from memfit.estimators.arch.specs import GatedDelta
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.records import record
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.allocator import allocated
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.mlx.recurrent_state import state_bytes
from memfit.estimators.results.estimate import Basis, Note
from memfit.estimators.runtimes.activation_bound import activation_bound
from memfit.estimators.runtimes.expert_capacity import expert_capacity
from memfit.estimators.runtimes.foundry import FoundrySettings
from memfit.estimators.runtimes.growth import (
    CHUNK_POSITIONS,
    GrowthEvent,
    adaptive_chunk,
    last_growth,
    rule_of,
)
from memfit.estimators.runtimes.interface import MLX, Figures, MlxEngine, RuntimeModel
from memfit.estimators.runtimes.llama_cpp.caches import Cells, recurrent_bytes
from memfit.estimators.runtimes.llama_cpp.compute import compute_bound
from memfit.estimators.runtimes.memory_plan import model_config, profile
from memfit.estimators.runtimes.registry import (
    AGENT_MEMORY,
    FOUNDRY,
    LLAMA_CPP,
    MLX_LM,
    MLX_MOE,
    MLX_SWIFT_LM,
    ON_MLX,
    VLLM,
    ZINC,
    Runtime,
    get_runtime,
)
from memfit.estimators.runtimes.token_cost import Charge, charges, needed_bytes
from memfit.estimators.weights.footprint import WeightFootprint
from memfit.estimators.workspace import ERROR_PERCENT, PeakMoment, peak

_ON_MLX = (MLX_LM, MLX_SWIFT_LM, MLX_MOE, AGENT_MEMORY)
_LOOKUP_BYTES = 8  # of each expert of each layer: mlx-moe's table of slots and its mask
# What a workspace's basis and error are where MLX's scheduler is followed, and where nothing is.
_DERIVED: tuple[Basis, int] = ("derived", ERROR_PERCENT)
_BOUND: tuple[Basis, int] = ("bound", 0)


@record(frozen=True, slots=True)
class MoeEngine(MlxEngine):
    """mlx-moe: as mlx-lm, with as many experts as fit in its share of the working set."""

    runtime: str = MLX_MOE
    experts: int = 0
    layers: int = 0
    expert_bytes: int = 0
    working_set_bytes: int | None = None

    def resident_bytes(self, footprint: WeightFootprint, backend: Backend) -> int:
        """Return the weights with the experts that are kept, and the table that finds them."""
        whole = MlxEngine.resident_bytes(self, footprint, backend)
        taken, _ = self._capacities(footprint)
        kept = taken * self.expert_bytes // self.experts
        return whole - self.expert_bytes + kept + self.layers * self.experts * _LOOKUP_BYTES

    def notes(self, footprint: WeightFootprint, units: Units) -> Iterator[Note]:
        """Yield the capacity, and mlx-moe's own where it is another."""
        right, its_own = self._capacities(footprint)
        size = format_bytes(right * self.expert_bytes // self.experts, units)
        text = f"mlx-moe keeps {right} of {self.experts} experts a layer: {size}"
        yield Note("info", "expert-capacity", text)
        if its_own != right:
            size = format_bytes((its_own - right) * self.expert_bytes // self.experts, units)
            text = (
                f"mlx-moe's own capacity is {its_own}, {size} more than 71 % of the working set"
                " pays for: it divides decimal megabytes by 1024"
            )
            yield Note("warning", "runtime-fault", text)

    def _capacities(self, footprint: WeightFootprint) -> tuple[int, int]:
        """The capacity by integers, and by mlx-moe's code (select_capacity)."""
        if self.working_set_bytes is None:
            return self.experts, self.experts
        other = footprint.loaded_bytes - self.expert_bytes
        right = expert_capacity(
            working_set_bytes=self.working_set_bytes,
            other_bytes=other,
            expert_bytes=self.expert_bytes,
            experts=self.experts,
        ).experts
        room = max(0, self.working_set_bytes * 71 // 100 - other)
        its_own = room * 1024 * self.experts // (1000 * self.expert_bytes)
        its_own -= its_own % 8 if its_own >= 16 else 0
        return right, min(self.experts, its_own)


@record(frozen=True, slots=True)
class RuledEngine:
    """A runtime described by its row of the table.

    ``gguf`` is the checkpoint when it is one: its tensors tell how wide a layer is.
    """

    rules: Runtime
    gguf: Checkpoint | None = None
    settings: FoundrySettings = field(default_factory=FoundrySettings)

    @property
    def runtime(self) -> str:
        """The runtime's name."""
        return self.rules.name

    @property
    def workspace_basis(self) -> tuple[Basis, int]:
        """agent-memory computes as mlx-lm does; of the others a bound is known."""
        return _DERIVED if self.runtime == AGENT_MEMORY else _BOUND

    def resident_bytes(self, footprint: WeightFootprint, backend: Backend) -> int:
        """Return the bytes of the weights, rounded where MLX's allocator holds them."""
        if self.runtime != AGENT_MEMORY:
            return footprint.loaded_bytes
        return sum(count * allocated(size, backend) for size, count in footprint.sizes.items())

    def figures(
        self, model: Model, footprint: WeightFootprint, workload: Workload, device: Device | None
    ) -> Figures:
        """Return what a workload takes.

        Raises:
            UnsupportedError: when the runtime has no cache of those bits, or no plan of a layer.
        """
        kept = charges(model, self.rules, workload)
        last = self._last_growth(workload)
        kv = self._cache(kept, last.after, workload)
        states = self._states(model, workload)
        growing = sum(_bytes(charge, last.alive - last.after) for charge in kept) * workload.batch
        work = self._workspace(model, footprint, workload, device) + growing
        weights = self.resident_bytes(footprint, device.backend if device else "metal")
        total = weights + kv.nbytes + states + work
        buffers = [
            max(footprint.sizes, default=0),
            max(map(_largest, kept), default=0) * last.after,
        ]
        explanation = tuple(self._explained(kept, last, workload, kv, work, total))
        moment = PeakMoment("prefill", total, work, max(buffers), "weight or cache", explanation)
        return Figures(kv, states, moment)

    def notes(self, model: Model, workload: Workload, units: Units) -> Iterator[Note]:
        """Yield where the runtime's own figure and the right one differ at this workload."""
        if self.runtime == ZINC and any(mixer.kind == GatedDelta.kind for mixer in model.mixers()):
            its_own = self._cache(
                charges(model, self.rules, workload), workload.total_tokens, workload
            ).nbytes
            right = needed_bytes(model, self.rules, workload)
            states = state_bytes(model, workload.batch)
            text = (
                f"zinc charges its cache to all {len(model.layers)} layers:"
                f" {format_bytes(its_own, units)}, where those that attend need"
                f" {format_bytes(right, units)}; and states to all:"
                f" {format_bytes(self._states(model, workload), units)}, where the model's are"
                f" {format_bytes(states, units)}"
            )
            yield Note("warning", "runtime-fault", text)
        if self.runtime == AGENT_MEMORY:
            yield from self._pool(charges(model, self.rules, workload), workload)

    def _pool(self, kept: tuple[Charge, ...], workload: Workload) -> Iterator[Note]:
        """Whether the pool of blocks has as many as the workload takes."""
        capacity = self._last_growth(workload).after
        needed = workload.batch * sum(_bytes(charge, capacity) for charge in kept)
        pool = self.rules.budget.bytes or 0
        if needed > pool:
            text = f"its caches take {needed} bytes of blocks, above the pool of {pool}"
            yield Note("warning", "pool", f"agent-memory would evict: {text}")

    def _cache(self, kept: tuple[Charge, ...], capacity: int, workload: Workload) -> KVCache:
        tokens, batch = workload.total_tokens, workload.batch
        table = _table_bytes(self.rules)
        per_token = sum(c.layers * c.token_bytes for c in kept) + table
        held = sum(c.layers * c.token_bytes * c.held_tokens(tokens) for c in kept) + table * tokens
        return KVCache(
            nbytes=batch * (sum(_bytes(charge, capacity) for charge in kept) + table * capacity),
            held_bytes=batch * held,
            bytes_per_token=per_token,
            held_tokens=max((charge.held_tokens(tokens) for charge in kept), default=0),
            allocated_tokens=max((c.allocated_tokens(capacity) for c in kept), default=0),
        )

    def _last_growth(self, workload: Workload) -> GrowthEvent:
        return last_growth(rule_of(self.rules), workload.total_tokens)

    def _states(self, model: Model, workload: Workload) -> int:
        if self.runtime == ZINC:
            return workload.batch * profile(model_config(model)).gpu_ssm_bytes
        if self.runtime == LLAMA_CPP:
            return recurrent_bytes(model, workload.batch)
        return state_bytes(model, workload.batch)

    def _workspace(
        self, model: Model, footprint: WeightFootprint, workload: Workload, device: Device | None
    ) -> int:
        if self.runtime == ZINC:
            plan = profile(model_config(model))
            device_bytes = plan.fixed_device_local_bytes - plan.gpu_ssm_bytes
            return device_bytes + plan.fixed_host_visible_bytes
        if self.runtime == AGENT_MEMORY:
            return _adaptive_workspace(model, footprint, workload, device, self.rules)
        rows = min(workload.prefill_step, workload.prompt_tokens) * workload.batch
        if self.gguf:
            room = Cells(workload.total_tokens, rows, workload.batch, 1)
            return compute_bound(model, self.gguf.tensors or (), room).nbytes
        wide = dtypes.nbytes(1, "F32" if self.runtime == LLAMA_CPP else model.dtype)
        logit_rows = workload.batch if self.runtime == VLLM else self._rows_of_logits(rows)
        return activation_bound(model, rows=rows, logit_rows=logit_rows, width=wide)

    def _rows_of_logits(self, rows: int) -> int:
        """Foundry keeps logits of a chunk or of a batch of speculated tokens."""
        return max(rows, self.settings.decode_batch) if self.runtime == FOUNDRY else rows

    def _explained(
        self,
        kept: tuple[Charge, ...],
        last: GrowthEvent,
        workload: Workload,
        kv: KVCache,
        work: int,
        total: int,
    ) -> Iterator[str]:
        for charge in kept:
            tokens = charge.allocated_tokens(last.after)
            yield (
                f"KV of {charge.layers} layers = {charge.layers} x {charge.token_bytes} bytes"
                f" x {tokens} tokens allocated ({self.rules.growth}) x batch {workload.batch}"
                f" = {charge.layers * charge.token_bytes * tokens * workload.batch} bytes"
            )
        yield f"KV cache = {kv.nbytes} bytes"
        yield f"peak = weights, cache, states {total - work} + workspace {work} = {total} bytes"


def engine_under(
    rules: Runtime,
    current: RuntimeModel,
    checkpoint: Checkpoint,
    model: Model,
    footprint: WeightFootprint,
    device: Device | None,
    settings: FoundrySettings,
) -> RuntimeModel:
    """Return the engine that sizes a model for a runtime.

    Raises:
        UnsupportedError: when the runtime cannot load the checkpoint at all.
    """
    gguf = checkpoint if checkpoint.source == "gguf" else None
    if rules.name == LLAMA_CPP and gguf:
        return current
    if gguf and rules.name in ON_MLX:
        raise UnsupportedError(
            f"{checkpoint.id}: {rules.name} loads no GGUF file; size it for llama.cpp, or convert"
            " it first"
        )
    if rules.name == MLX_LM:
        return MLX
    if rules.name == MLX_SWIFT_LM:
        return MlxEngine(runtime=MLX_SWIFT_LM)
    if rules.name == MLX_MOE:
        return _moe(checkpoint, model, footprint, device)
    return RuledEngine(rules, gguf, settings)


def runtime_assumptions(engine: RuntimeModel, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield how a runtime allocates, and what its figures leave open."""
    if engine.runtime == MLX_LM or (engine.runtime == LLAMA_CPP and checkpoint.source == "gguf"):
        return
    rules = get_runtime(engine.runtime)
    yield f"{rules.name}: {rules.allocates}; keeps {rules.keeps}"
    if rules.name in (MLX_SWIFT_LM, MLX_MOE, AGENT_MEMORY):
        yield "the workspace follows the operations of mlx-lm's class of this model"
    else:
        yield "the workspace is a bound by the widest layer, without what kernels take besides"
    if rules.name in (LLAMA_CPP, ZINC, FOUNDRY) and checkpoint.source != "gguf":
        yield f"{rules.name} loads GGUF files: a conversion's weights will have other sizes"
    if rules.name == VLLM:
        yield "one sequence's pages are counted; vLLM takes 92 % of the GPU's memory for its pool"


def runtime_notes(
    engine: RuntimeModel, model: Model, footprint: WeightFootprint, workload: Workload, units: Units
) -> Iterator[Note]:
    """Yield the runtime's own answer and the right one, where they differ."""
    if isinstance(engine, RuledEngine):
        yield from engine.notes(model, workload, units)
    elif isinstance(engine, MoeEngine):
        yield from engine.notes(footprint, units)
    elif engine.runtime == MLX_SWIFT_LM:
        yield from _swift_notes(model, workload, units)


def _swift_notes(model: Model, workload: Workload, units: Units) -> Iterator[Note]:
    """The formulas of its guide to wired memory against the bytes it allocates."""
    if workload.kv_bits:
        plain = charges(model, get_runtime(MLX_SWIFT_LM), replace(workload, kv_bits=None))
        told = sum(_bytes(c, c.held_tokens(workload.total_tokens)) for c in plain)
        told = told * workload.kv_bits // 16
        kept = charges(model, get_runtime(MLX_SWIFT_LM), workload)
        right = sum(_bytes(c, c.held_tokens(workload.total_tokens)) for c in kept)
        text = (
            f"mlx-swift-lm's guide tells {format_bytes(told, units)} of cache at"
            f" {workload.kv_bits} bits; with scales and biases it is {format_bytes(right, units)}"
        )
        yield Note("warning", "runtime-fault", text)
    deltas = [mixer for mixer in model.mixers() if mixer.kind == GatedDelta.kind]
    if deltas:
        told = 2 * sum(state.elements for mixer in deltas for state in mixer.states())
        text = (
            f"mlx-swift-lm's guide tells {format_bytes(told, units)} of recurrent states; in"
            f" float32 they are {format_bytes(state_bytes(model, 1), units)}"
        )
        yield Note("warning", "runtime-fault", text)


def _moe(
    checkpoint: Checkpoint, model: Model, footprint: WeightFootprint, device: Device | None
) -> MoeEngine:
    blocks = model.experts().values()
    counts = {block.experts for block in blocks}
    expert_bytes = footprint.by_part[Part.EXPERTS.value]
    if len(counts) != 1 or not expert_bytes or footprint.basis == "bound":
        raise UnsupportedError(
            f"{checkpoint.id}: mlx-moe keeps experts, as many in every layer; this has none such"
        )
    working_set = device.working_set_bytes if device else None
    return MoeEngine(
        experts=counts.pop(),
        layers=len(blocks),
        expert_bytes=expert_bytes,
        working_set_bytes=working_set,
    )


def _adaptive_workspace(
    model: Model,
    footprint: WeightFootprint,
    workload: Workload,
    device: Device | None,
    rules: Runtime,
) -> int:
    """The largest workspace of the phases in which agent-memory's chunk shrinks.

    A window's cache is quantised by agent-memory itself; its operations are taken for plain ones.
    """
    largest = 0
    for start, end in zip(CHUNK_POSITIONS, (*CHUNK_POSITIONS[1:], None), strict=True):
        if start >= workload.prompt_tokens:
            break
        step = adaptive_chunk(start, largest=workload.prefill_step, least=rules.least_prefill_step)
        phase = replace(
            workload,
            prompt_tokens=min(end or workload.prompt_tokens, workload.prompt_tokens),
            prefill_step=min(step, workload.prefill_step),
        )
        largest = max(largest, _mlx_workspace(model, footprint, phase, device))
    return largest


def _mlx_workspace(
    model: Model, footprint: WeightFootprint, workload: Workload, device: Device | None
) -> int:
    for bits in (workload.kv_bits, None):
        try:
            asked = replace(workload, kv_bits=bits)
            moment = peak(model, asked, resident_bytes=0, plan=footprint.plan, device=device)
        except UnsupportedError:
            continue
        return moment.workspace_bytes
    raise UnsupportedError(f"{model.model_type}: its workspace is not described")


def _bytes(charge: Charge, tokens: int) -> int:
    return charge.layers * charge.token_bytes * charge.allocated_tokens(tokens)


def _largest(charge: Charge) -> int:
    """Bytes a token of the largest buffer: keys of one layer, or values."""
    return -(-charge.token_bytes // 2)


def _table_bytes(rules: Runtime) -> int:
    """zinc's page table, in host memory."""
    return 4 if rules.name == ZINC else 0
