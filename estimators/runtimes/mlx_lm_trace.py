"""mlx-lm's own class run lazily in place of the formulas, as an engine like the others."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, NamedTuple

from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Part
from memfit.estimators.arch.registry import context_limit
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.kv_cache import KVCache, kv_cache
from memfit.estimators.mlx.recurrent_state import state_bytes
from memfit.estimators.results.estimate import Basis, Note, Phase, RunCall
from memfit.estimators.runtimes.interface import MLX, Figures
from memfit.estimators.runtimes.registry import MLX_LM, get_runtime
from memfit.estimators.weights.footprint import WeightFootprint, bounded
from memfit.estimators.weights.parts import part_of
from memfit.estimators.workspace import PeakMoment

# The trace is imported where it runs: a sixth of a formula's answer would be spent on it.
if TYPE_CHECKING:
    from memfit.estimators.trace.peak import TracedPeak
    from memfit.estimators.trace.traced_model import TracedModel, TracedShapes

# Predicted against measured peaks: docs/accuracy.md.
TRACE_ERROR_PERCENT = 10
_ANY_MAC = Device("any Mac", "metal", 0, 0, None, "flag", "s")
_PREFILL = {"first_chunk", "converting", "full_chunk", "last_chunk"}
_ONE_TOKEN = Workload(prompt_tokens=1)
_NAMED_ALIVE = 8
MAX_SPANS = 240


@record(frozen=True, slots=True)
class TraceEngine:
    """mlx-lm by trace: shapes from its class, the peak from its graph.

    ``described`` says that the formulas know the model too, and what follows from many
    workloads (the longest context) is searched by them. The class is built once for a backend.
    """

    checkpoint: Checkpoint
    quantize: Quantization | None
    dtype: str
    described: bool
    runtime: str = MLX_LM
    workspace_basis: tuple[Basis, int] = ("traced", TRACE_ERROR_PERCENT)
    _built: dict[Backend, "TracedModel"] = field(default_factory=dict, compare=False, repr=False)
    _runs: dict[tuple[Workload, Device], "Run"] = field(
        default_factory=dict, compare=False, repr=False
    )

    def resident_bytes(self, footprint: WeightFootprint, backend: Backend) -> int:
        """Return the bytes as the backend's allocator rounds them."""
        return MLX.resident_bytes(footprint, backend)

    def figures(
        self, model: Model, footprint: WeightFootprint, workload: Workload, device: Device | None
    ) -> Figures:
        """Return what a workload takes."""
        shapes, traced = self.run(workload, device)
        per_token = (
            kv_cache(model, workload).bytes_per_token if self.described else self._per_token()
        )
        kv = KVCache(
            nbytes=shapes.kv_bytes,
            held_bytes=shapes.kv_held_bytes,
            bytes_per_token=per_token,
            held_tokens=shapes.held_tokens,
            allocated_tokens=shapes.allocated_tokens,
        )
        if traced is None:
            derived = MLX.figures(model, footprint, workload, device)
            return replace(derived, kv=kv, ssm_bytes=shapes.ssm_bytes)
        return Figures(kv, shapes.ssm_bytes, _moment(traced))

    def basis_of(self, workload: Workload, device: Device | None) -> tuple[Basis, int]:
        """Return the basis of a workload's workspace; no percentage where nothing was measured."""
        if self.run(workload, device).peak is None:
            return MLX.workspace_basis
        return ("traced", 0) if device and device.backend == "cuda" else self.workspace_basis

    def run(self, workload: Workload, device: Device | None) -> "Run":
        """Return what the class holds when a workload ends, and its largest moment on the way."""
        from memfit.estimators.trace.gc_pause import not_collecting

        machine = device or _ANY_MAC
        if (workload, machine) not in self._runs:
            with not_collecting():
                self._runs[workload, machine] = self._followed(workload, machine)
        return self._runs[workload, machine]

    def _followed(self, workload: Workload, machine: Device) -> "Run":
        from memfit.estimators.trace.kernel_stubs import TraceTarget
        from memfit.estimators.trace.peak import peak
        from memfit.estimators.trace.recording import LargeGraphError

        target = TraceTarget(
            backend=machine.backend,
            nax=has_nax(machine),
            compute_capability=machine.generation if machine.backend == "cuda" else None,
            mlx_version=get_runtime(MLX_LM).mlx_version,
        )
        built = self.built(machine.backend)
        try:
            trace, shapes = built.record(workload, target)
        except LargeGraphError:
            if not self.described:
                raise
            return Run(built.shapes(workload), None)
        return Run(shapes, peak(trace, machine))

    def shapes(self, workload: Workload) -> "TracedShapes":
        """Return the bytes that the class holds when a workload ends."""
        built = next(iter(self._built.values()), None) or self.built(_ANY_MAC.backend)
        return built.shapes(workload)

    def built(self, backend: Backend) -> "TracedModel":
        """Return the class as it is built on a backend's machine."""
        from memfit.estimators.trace.traced_model import TracedModel

        if backend not in self._built:
            self._built[backend] = TracedModel(
                self.checkpoint.config,
                backend,
                name=self.checkpoint.config_name,
                dtype=self.dtype,
                tensors=self.checkpoint.tensors if self.quantize is None else None,
                quantize=self.quantize,
            )
        return self._built[backend]

    def versions(self) -> str:
        """Return the versions of what was run."""
        from memfit.estimators.trace.libraries import versions

        return ", ".join(f"{name} {version}" for name, version in versions().items())

    def _per_token(self) -> int:
        two, three = (self.shapes(replace(_ONE_TOKEN, prompt_tokens=n)) for n in (2, 3))
        return three.kv_held_bytes - two.kv_held_bytes


class Run(NamedTuple):
    """One workload on one device: what is left of it, and its largest moment.

    No moment is known of a run whose graphs are too large to record.
    """

    shapes: "TracedShapes"
    peak: "TracedPeak | None"


def run_calls(peak: "TracedPeak | None") -> tuple[RunCall, ...]:
    """Return the calls of a run for a plot, at most ``MAX_SPANS`` spans of operations for each."""
    if peak is None:
        return ()
    return tuple(
        RunCall(call.phase, call.tokens, call.position, len(call.curve), _spans(call.curve))
        for call in peak.calls
        if call.curve
    )


def _spans(curve: tuple[int, ...]) -> tuple[int, ...]:
    count, total = min(MAX_SPANS, len(curve)), len(curve)
    ends = [total * (span + 1) // count for span in range(count)]
    return tuple(max(curve[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def undescribed_model(checkpoint: Checkpoint, dtype: str) -> Model:
    """Return what a config says of a model that only the trace knows: no layers, no modules."""
    fields = Fields(checkpoint.config, checkpoint.config_name)
    return Model(
        model_type=fields.text("model_type"),
        hidden_size=0,
        vocab_size=0,
        layers=(),
        modules=(),
        dtype=dtype,
        max_context=context_limit(fields),
        notes=("formulas do not describe this model: every figure is by trace alone",),
    )


def traced_weights(
    engine: TraceEngine, footprint: WeightFootprint | None, device: Device | None
) -> WeightFootprint:
    """Return the weights as the class holds them; ``weighed`` is what the formulas say.

    A difference between the two is noted, never averaged.
    """
    built = engine.built((device or _ANY_MAC).backend)
    weights, sizes = built.weights, Counter(built.weights.values())
    if footprint is None:
        footprint = _weighed_by_trace(engine, weights, sizes)
        method = None if engine.quantize else built.unread_format
        if method is None:
            return footprint
        text = (
            f"quantisation method {method!r}: how mlx-lm would hold it is not described; the"
            " weights are bounded by the unquantised model"
        )
        return bounded(footprint, "dequantised", text)
    notes = footprint.notes
    traced_bytes = sum(weights.values())
    if traced_bytes != footprint.loaded_bytes:
        text = (
            f"loaded weights: trace {traced_bytes} bytes, formula {footprint.loaded_bytes};"
            " the trace is shown"
        )
        notes = (*notes, Note("warning", "methods-differ", text))
    return replace(footprint, sizes=sizes, notes=notes)


def compared(
    engine: TraceEngine, model: Model, workload: Workload, figures: Figures
) -> tuple[Note, ...]:
    """Return a note for each cache that trace and formula see differently."""
    if not engine.described:
        return ()
    pairs = (
        ("KV cache", figures.kv.nbytes, kv_cache(model, workload).nbytes),
        ("recurrent state", figures.ssm_bytes, state_bytes(model, workload.batch)),
    )
    return tuple(
        Note("warning", "methods-differ", f"{name}: trace {traced} bytes, formula {derived}")
        for name, traced, derived in pairs
        if traced != derived
    )


def untraced(engine: TraceEngine, workload: Workload, device: Device | None) -> Iterator[Note]:
    """Yield what the workspace of a workload does not rest on, where that is less than a trace."""
    if engine.run(workload, device).peak is None:
        text = (
            f"{engine.checkpoint.config_name}: the graph of this run of"
            f" {engine.checkpoint.config['model_type']} is too large to follow: weights, caches"
            " and states are by trace, the workspace is by formula"
        )
        yield Note("warning", "graph-too-large", text)
    elif device and device.backend == "cuda":
        text = "no figure of the trace was held against MLX on CUDA: how far it may be is unknown"
        yield Note("warning", "unmeasured", text)


def _weighed_by_trace(
    engine: TraceEngine, weights: Mapping[str, int], sizes: "Counter[int]"
) -> WeightFootprint:
    tensors = engine.checkpoint.tensors if engine.quantize is None else None
    named = weights if tensors is None else {t.name: t.nbytes for t in tensors}
    parts = {part.value: 0 for part in Part}
    for name, nbytes in named.items():
        parts[part_of(name).value] += nbytes
    return WeightFootprint(
        nbytes=sum(named.values()),
        by_part=parts,
        parameters=_parameters(engine),
        sizes=sizes,
        basis="exact" if tensors else "traced",
        plan=None,
    )


def _parameters(engine: TraceEngine) -> int:
    """In float32 and unquantised, the class's bytes count its parameters by four."""
    from memfit.estimators.trace.traced_model import TracedModel

    plain = {
        key: value
        for key, value in engine.checkpoint.config.items()
        if key not in ("quantization", "quantization_config")
    }
    built = TracedModel(plain, _ANY_MAC.backend, name=engine.checkpoint.config_name, dtype="F32")
    return sum(built.weights.values()) // 4


def _moment(traced: "TracedPeak") -> PeakMoment:
    phase: Phase = "prefill" if traced.phase in _PREFILL else "decode"
    alive = ", ".join(f"{name} {nbytes}" for name, nbytes in traced.alive[:_NAMED_ALIVE])
    return PeakMoment(
        phase=phase,
        nbytes=traced.nbytes,
        workspace_bytes=traced.workspace_bytes,
        largest_buffer_bytes=traced.largest_buffer_bytes,
        largest_buffer=traced.operation,
        explanation=(
            f"peak by trace = {traced.nbytes} bytes in {traced.phase}, at {traced.operation}",
            f"  alive then: {alive}",
        ),
        prefill_bytes=traced.prefill_bytes,
        decode_bytes=traced.decode_bytes,
    )
