"""The largest moment of a run: load, every chunk of prefill, decode.

The transient is derived, not fitted: each layer's operations are laid out as mlx-lm writes them and
MLX's scheduler is followed over them. docs/accuracy.md holds it against measurements.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from memfit.estimators.arch.caches import Growth, KVBuffer
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Module, Part
from memfit.estimators.arch.specs import Mixer
from memfit.estimators.base import dtypes
from memfit.estimators.base.records import record
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.cache_growth import capacity_at
from memfit.estimators.mlx.call_plan import PlannedCall, planned_chunks
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.scheduler import BatchLimits
from memfit.estimators.workspace.attention import needs_array_mask
from memfit.estimators.workspace.call import (
    BackendTraits,
    CallShape,
    KVFormat,
    Occupancy,
    decode_occupancy,
    prefill_occupancy,
)
from memfit.estimators.workspace.layer import head_program, layer_program
from memfit.estimators.workspace.layer_plan import (
    LayerPlan,
    QuantizationOf,
    plan_layer,
    touched_elements,
)
from memfit.estimators.workspace.schedule import formula_limits, transient_peak
from memfit.estimators.workspace.tape import Program

Phase = Literal["load", "prefill", "decode"]

# Layers simulated around the last of each kind: these or more, as many as can be in flight.
_WINDOW = 8


@record(frozen=True, slots=True)
class PeakMoment:
    """The most memory in use at once during a run, with the phase it falls in.

    ``nbytes`` is everything alive: weights, caches, states and the transient. ``workspace_bytes``
    is what of it is neither weights nor the caches and states as the workload leaves them.
    ``largest_buffer_bytes`` is the biggest single allocation, named by ``largest_buffer``.
    ``prefill_bytes`` and ``decode_bytes`` are the largest of each phase, where phases are told.
    """

    phase: Phase
    nbytes: int
    workspace_bytes: int
    largest_buffer_bytes: int
    largest_buffer: str
    explanation: tuple[str, ...]
    prefill_bytes: int | None = None
    decode_bytes: int | None = None


@record(frozen=True, slots=True)
class _Candidate:
    phase: Phase
    nbytes: int
    largest: int
    largest_name: str
    explanation: tuple[str, ...]


@record(frozen=True, slots=True)
class Workspace:
    """A model prepared for one device; ``peak`` is then cheap to ask for many workloads."""

    model: Model
    target: BackendTraits
    limits: BatchLimits
    plans: tuple[LayerPlan, ...]  # the distinct ones
    order: tuple[int, ...]  # of each layer, which plan
    head_touched: int
    largest_weight: int

    def peak(self, workload: Workload, *, weight_bytes: int) -> PeakMoment:
        """Return the largest moment of a workload over ``weight_bytes`` of resident weights."""
        run = _Run(self, workload, weight_bytes)
        candidates = list(run.candidates())
        best = max(candidates, key=lambda c: c.nbytes)
        buffers = [
            (self.largest_weight, "weight"),
            *((c.largest, c.largest_name) for c in candidates),
        ]
        largest, name = max(buffers)
        return PeakMoment(
            phase=best.phase,
            nbytes=best.nbytes,
            workspace_bytes=max(0, best.nbytes - weight_bytes - run.kept_bytes()),
            largest_buffer_bytes=largest,
            largest_buffer=name,
            explanation=best.explanation,
            prefill_bytes=max(c.nbytes for c in candidates if c.phase != "decode"),
            decode_bytes=max(c.nbytes for c in candidates if c.phase == "decode"),
        )


def prepare(
    model: Model,
    device: Device,
    *,
    mlx_version: tuple[int, ...],
    quantization: QuantizationOf | None = None,
) -> Workspace:
    """Return a model's workspace on a device; ``quantization`` says how each module is packed.

    Raises:
        UnsupportedError: by ``peak``, when MLX is older than the oldest kernels described.
    """
    numbers: dict[LayerPlan, int] = {}
    order = []
    for index, layer in enumerate(model.layers):
        plan = plan_layer(layer, f"{model.layers_path}.{index}.", quantization)
        order.append(numbers.setdefault(plan, len(numbers)))
    return Workspace(
        model,
        BackendTraits(device.backend, mlx_version, has_nax(device)),
        formula_limits(device),
        tuple(numbers),
        tuple(order),
        _head_touched(model, quantization),
        _largest_weight(model, quantization),
    )


def _head_touched(model: Model, quantization: QuantizationOf | None) -> int:
    heads = [m for m in model.modules if m.part is Part.HEAD] or [
        m for m in model.modules if m.part is Part.EMBEDDING
    ]
    if not heads:
        return 0
    module: Module = heads[0]
    return touched_elements(module, quantization(module.path, module) if quantization else None)


def _largest_weight(model: Model, quantization: QuantizationOf | None) -> int:
    width = dtypes.nbytes(1, model.dtype)
    sizes = [0]
    for path, module in model.all_modules():
        format_ = quantization(path, module) if quantization and module.quantizable else None
        if module.loaded and format_:
            sizes.append(max(format_.tensors(module.elements, width)))
        elif module.loaded:
            sizes.append(module.elements * width)
    return max(sizes)


class _Run:
    """One workload on one prepared model."""

    def __init__(self, workspace: Workspace, workload: Workload, weight_bytes: int) -> None:
        self.workspace = workspace
        self.workload = workload
        self.weight_bytes = weight_bytes
        self.width = dtypes.nbytes(1, workspace.model.dtype)
        self.buffers = [
            tuple(self._own_buffers(mixer.mixer) for mixer in plan.mixers)
            for plan in workspace.plans
        ]
        self.counts = self._count_buffers()
        self.state_bytes = self._state_bytes()

    def kept_bytes(self) -> int:
        """Return the caches and states as the workload leaves them."""
        end = self.workload.total_tokens
        return self.state_bytes + sum(
            count
            * self._format(buffer, end).nbytes(buffer.elements_per_token * self.workload.batch)
            * capacity_at(buffer, self.workload, end)
            for buffer, count in self.counts.items()
        )

    def candidates(self) -> Iterator[_Candidate]:
        """Yield the moments that can be the largest."""
        yield _Candidate(
            "load", self.weight_bytes, 0, "", (f"load = weights {self.weight_bytes:,}",)
        )
        spans = planned_chunks(self.workload)
        for span in spans:
            yield self._moment("prefill", span)
        last = self.workload.total_tokens
        if self._quantised(last) and any(self._convertible(b) for b in self.counts):
            yield self._conversion(spans)
        yield self._moment("decode", PlannedCall("decode", 1, last))

    def _moment(self, phase: Phase, span: PlannedCall) -> _Candidate:
        workspace, workload = self.workspace, self.workload
        kv = {b: self._format(b, span.position) for b in self.counts}
        occupancy = {
            b: prefill_occupancy(b, workload, span, kv[b])
            if phase == "prefill"
            else decode_occupancy(b, workload, kv[b])
            for b in self.counts
        }
        previous = min(span.position, workload.prefill_step) if phase == "prefill" else 0
        call = CallShape(
            span.tokens, workload.batch, self.width, workspace.target, occupancy, previous
        )
        hidden = workspace.model.hidden_size
        programs = [
            layer_program(plan, call, hidden, buffers)
            for plan, buffers in zip(workspace.plans, self.buffers, strict=True)
        ]
        window = _WINDOW if phase == "decode" else _in_flight(programs, workspace.limits)
        chosen = _simulated(workspace.order, window)
        sequence = [programs[workspace.order[index]] for index in chosen]
        late = [programs[number].deferred for number in workspace.order]
        if phase == "decode":
            vocabulary = workspace.model.vocab_size
            sequence.append(head_program(vocabulary, workspace.head_touched, call, hidden))
        caches = self._cache_bytes(occupancy, chosen)
        fixed = call.rows * hidden * self.width + self._mask_bytes(call)
        outside = set(range(len(workspace.order))).difference(chosen)
        deferred_bytes = sum(programs[workspace.order[index]].deferred_bytes for index in outside)
        layers = [*(p.steps for p in sequence), *late]
        transient = deferred_bytes + transient_peak(layers, workspace.limits)
        states = self.state_bytes + self._viewed_bytes(phase, call, chosen)
        parts = (self.weight_bytes, caches, states, fixed, transient)
        largest, name = max(
            [(p.largest, p.largest_name) for p in sequence]
            + [(self._largest_buffer(b, o), "KV buffer") for b, o in occupancy.items()]
        )
        return _Candidate(phase, sum(parts), largest, name, _explain(phase, span, parts))

    def _conversion(self, spans: tuple[PlannedCall, ...]) -> _Candidate:
        """All caches as they were and quantised at once (generate.py, maybe_quantize_kv_cache)."""
        start = self.workload.quantized_kv_start
        span = next((s for s in spans if s.position + s.tokens >= start), None)
        total = plain = 0
        for buffer, count in self.counts.items():
            kv = KVFormat(self.width)
            if span is None:
                capacity = decode_occupancy(buffer, self.workload, kv).after
            else:
                capacity = prefill_occupancy(buffer, self.workload, span, kv).after
            elements = buffer.elements_per_token * capacity * self.workload.batch * count
            plain += elements * self.width
            if self._convertible(buffer):
                total += self._quantised_format().nbytes(elements)
        phase: Phase = "decode" if span is None else "prefill"
        parts = (self.weight_bytes, plain, total, self.state_bytes)
        line = (
            f"{phase} at the switch to quantised keys and values = weights {parts[0]:,} + caches"
            f" before {plain:,} + after {total:,} + states {self.state_bytes:,}"
        )
        return _Candidate(phase, sum(parts), 0, "", (line,))

    def _own_buffers(self, mixer: Mixer) -> tuple[KVBuffer, ...]:
        found = list(mixer.kv_buffers())
        limit = self.workload.max_kv_size
        if limit is not None and not self.workspace.model.makes_own_cache:
            found = [replace(b, growth=Growth.ROTATING, limit=limit) for b in found]
        return tuple(found)

    def _count_buffers(self) -> Counter[KVBuffer]:
        """How many layers own each distinct buffer; 0 for one that is only read."""
        counts: Counter[KVBuffer] = Counter()
        per_plan = Counter(self.workspace.order)
        for number, plan in enumerate(self.workspace.plans):
            for mixer, buffers in zip(plan.mixers, self.buffers[number], strict=True):
                for buffer in buffers:
                    counts[buffer] += per_plan[number] if mixer.mixer.owns_cache else 0
        return counts

    def _state_bytes(self) -> int:
        per_plan = Counter(self.workspace.order)
        return self.workload.batch * sum(
            per_plan[number] * dtypes.nbytes(c.elements, "F32" if c.float32 else self._dtype)
            for number, plan in enumerate(self.workspace.plans)
            for mixer in plan.mixers
            for c in mixer.mixer.states()
        )

    def _viewed_bytes(self, phase: Phase, call: CallShape, chosen: list[int]) -> int:
        """What states that are slices keep alive (mlx/recurrent_state.py, viewed_bytes)."""
        inside = Counter(self.workspace.order[index] for index in chosen)
        total = 0
        for number, count in Counter(self.workspace.order).items():
            for mixer in self.workspace.plans[number].mixers:
                for state in mixer.mixer.states():
                    outside = count - inside[number]
                    tokens = call.previous * count + max(0, call.tokens - call.previous) * outside
                    if phase == "decode":
                        chunk = min(self.workload.prompt_tokens - 1, self.workload.prefill_step)
                        tokens = chunk * count if state.survives_decode else 0
                    total += state.view_elements * tokens
        return total * self.width * call.batch

    @property
    def _dtype(self) -> str:
        return self.workspace.model.dtype

    def _cache_bytes(self, occupancy: dict[KVBuffer, Occupancy], chosen: list[int]) -> int:
        """Caches before the call, and after it for the layers that are not simulated."""
        total = 0
        simulated: Counter[KVBuffer] = Counter()
        for index in chosen:
            for buffers in self.buffers[self.workspace.order[index]]:
                simulated.update(buffers)
        for buffer, count in self.counts.items():
            held = occupancy[buffer]
            token = held.kv.nbytes(buffer.elements_per_token * self.workload.batch)
            inside = min(count, simulated[buffer])
            total += token * (held.before * inside + held.after * (count - inside))
        return total

    def _mask_bytes(self, call: CallShape) -> int:
        """One mask for all layers of a kind: window or latent attention over a chunk."""
        cells = set()
        for plan, buffers in zip(self.workspace.plans, self.buffers, strict=True):
            for mixer, own in zip(plan.mixers, buffers, strict=True):
                if not own or call.tokens == 1:
                    continue
                keys = call.occupancy[own[0]].keys
                if needs_array_mask(mixer.mixer, call, call.occupancy[own[0]]):
                    cells.add(call.tokens * keys)
        return sum(cells)

    def _largest_buffer(self, buffer: KVBuffer, held: Occupancy) -> int:
        dim = max(buffer.key_dim, buffer.value_dim)
        return held.kv.nbytes(buffer.heads * dim * self.workload.batch) * held.after

    def _convertible(self, buffer: KVBuffer) -> bool:
        return buffer.growth is Growth.STEPS and not buffer.in_cache_list

    def _quantised(self, position: int) -> bool:
        start = self.workload.quantized_kv_start
        return self.workload.kv_bits is not None and position > 0 and position >= start

    def _quantised_format(self) -> KVFormat:
        return KVFormat(self.width, self.workload.kv_bits, self.workload.kv_group_size)

    def _format(self, buffer: KVBuffer, position: int) -> KVFormat:
        if self._convertible(buffer) and self._quantised(position):
            return self._quantised_format()
        return KVFormat(self.width)


def _in_flight(programs: list[Program], limits: BatchLimits) -> int:
    """Return how many layers can be in flight together: the cheapest ones, in every batch."""
    batches = limits.in_flight + 1
    dispatches = min(sum(step.dispatches for step in p.steps) for p in programs)
    elements = min(sum(step.elements for step in p.steps) for p in programs)
    by_dispatches = ceil_div(batches * (limits.max_ops + 1), max(1, dispatches))
    by_elements = ceil_div(batches * (limits.max_mebi_elements + 1) << 20, max(1, elements))
    return max(_WINDOW, min(by_dispatches, by_elements))


def _simulated(order: tuple[int, ...], window: int) -> list[int]:
    """Return the layers that stand for all: those that end at the last of each kind."""
    last = {number: index for index, number in enumerate(order)}
    ends = {*last.values(), len(order) - 1}
    chosen = {i for end in ends for i in range(max(0, end - window + 1), end + 1)}
    return sorted(chosen)


def _explain(phase: Phase, span: PlannedCall, parts: tuple[int, ...]) -> tuple[str, ...]:
    names = ("weights", "caches", "states", "input and masks", "in flight")
    where = (
        f"prefill of {span.tokens} tokens after {span.position}"
        if phase == "prefill"
        else f"decode at {span.position} tokens"
    )
    total = " + ".join(f"{name} {part:,}" for name, part in zip(names, parts, strict=True))
    return (f"{where} = {total} = {sum(parts):,}",)
