"""A model as a runtime's own class describes it, and its workspace between traced prompts.

A workspace is the largest of the moments of a run, and each of them grows in proportion to the
tokens before it and to the sequences, but for steps of caches and of MLX's scheduler. So it is near
the line between two prompts, and the one between two batches.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Module, Part
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import MachineError, UnsupportedError
from memfit.estimators.base.ranks import Rank
from memfit.estimators.base.units import ceil_div, round_down, round_up
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import ANY_MAC, Backend, Device
from memfit.estimators.mlx.call_plan import PREFILL
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.results.terms import PeakMoment, Phase
from memfit.estimators.runtimes.interface import Subject
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.weights.derived import QuantizationPlan, part_of
from memfit.estimators.weights.footprint import WeightFootprint, bounded, bounded_by_name
from memfit.estimators.weights.quantization_plan import declared

# The trace is imported where it runs: a sixth of a formula's answer would be spent on it.
if TYPE_CHECKING:
    from memfit.estimators.checkpoint.adapters import Adapter
    from memfit.estimators.trace.kernel_stubs import TraceTarget
    from memfit.estimators.trace.peak import RunPeak

_STEP = 256
# Of a line, because too low is worse: it makes the first candidate of a search fit mostly.
_RAISED = 32
# A class that loops over tokens is traced with shorter chunks, but not with shorter ones than this.
_SHORTEST_STEP = 16
_SHORTER = 4
# How many times as long the prompt at the end of a line is as that at its start.
_GROWTH = 4
# The batch generator has other caches than one sequence, so that a line starts at two.
_FEW, _BATCH = 2, 8
# The longest prompt that is traced where a config names no limit.
_UNBOUNDED = 2**20


_NAMED_ALIVE = 8
_Target = tuple[Device | None, MlxVersions]


class ModelTrace(Struct, frozen=True, eq=False):
    """A runtime's class of a model, built once for a backend and run lazily for any workload."""

    checkpoint: Checkpoint
    quantize: Quantization | None
    """The format that it is converted to."""
    dtype: str
    rank: Rank | None = None
    """The rank that has this part of the class, None: it is the whole."""
    adapter: "Adapter | None" = None
    _unconverted_load: ClassVar[int | None] = 0
    """The peak of a load that converts nothing, in bytes; None: the formula has it."""
    _built: dict[Backend, Any] = {}
    _loads: dict[tuple[Device, MlxVersions], int | None] = {}

    def built(self, backend: Backend) -> Any:
        """Return the class as it is built on a backend's machine."""
        if backend not in self._built:
            self._built[backend] = self._build(backend)
        return self._built[backend]

    def _build(self, backend: Backend) -> Any:
        raise NotImplementedError

    def run(self, workload: Workload, device: Device | None, versions: MlxVersions) -> Any:
        """Return the largest moment of a workload, and why there is none where there is none."""
        raise NotImplementedError

    def moment(
        self, workload: Workload, device: Device | None, versions: MlxVersions
    ) -> PeakMoment | None:
        """Return the largest moment of a workload, None where it cannot be recorded."""
        raise NotImplementedError

    def failure(self, workload: Workload, device: Device | None, versions: MlxVersions) -> str:
        """Return why a workload has no moment, nothing where it has one."""
        failure: str = self.run(workload, device, versions).failure
        return failure

    def converted(self, quantize: Quantization) -> "ModelTrace":
        """Return the trace of the class with its weights converted."""
        raise NotImplementedError

    def description(self, device: Device | None) -> Model:
        """Return what formulas and plans need of the model, from the class itself.

        Raises:
            UnsupportedError: for a cache or a list of experts that is not described.
        """
        raise NotImplementedError

    def load_bytes(self, machine: Device, versions: MlxVersions) -> int | None:
        """Return the peak of the load in bytes, None where it is not known."""
        from memfit.estimators.trace.kernel_stubs import TraceTarget
        from memfit.estimators.trace.peak import load_peak

        key = machine, versions
        if key not in self._loads:
            target = TraceTarget(backend=machine.backend, versions=versions)
            try:
                call = self.built(machine.backend).load(target)
                self._loads[key] = (
                    load_peak(call, machine, versions.mlx) if call else self._unconverted_load
                )
            except (MachineError, UnsupportedError):
                self._loads[key] = None
        return self._loads[key]

    def weights(self, device: Device | None) -> Mapping[str, int]:
        """Return the bytes of each parameter by path."""
        weights: Mapping[str, int] = self.built((device or ANY_MAC).backend).weights
        return weights

    def unread_format(self, device: Device | None) -> str | None:
        """Return the declared quantisation method where the weights are not sized in it."""
        method: str | None = self.built((device or ANY_MAC).backend).unread_format
        return method


def trace_target(machine: Device, versions: MlxVersions) -> "TraceTarget":
    """Return the machine as a trace of a run needs it."""
    from memfit.estimators.trace.kernel_stubs import TraceTarget

    return TraceTarget(
        backend=machine.backend,
        nax=has_nax(machine),
        compute_capability=machine.generation if machine.backend == "cuda" else None,
        versions=versions,
    )


def peak_lines(peak: "RunPeak[Any]") -> tuple[str, str]:
    """Return the lines that explain a traced peak: its operation, and what was in use."""
    named, top = ", ".join(f"{name} {size}" for name, size in peak.alive[:_NAMED_ALIVE]), peak.top
    return (
        f"peak by trace = {peak.nbytes} bytes in {top.part}, at {top.operation}",
        f"  alive then: {named}",
    )


def moment_of(peak: "RunPeak[CallPhase]") -> PeakMoment:
    """Return the moment of the largest call of a run, and the most in each of its phases."""
    prefill = [nbytes for part, nbytes in peak.parts.items() if part in PREFILL]
    decode = [nbytes for part, nbytes in peak.parts.items() if part not in PREFILL]
    most = max(peak.held, key=peak.held.__getitem__)
    return PeakMoment(
        phase="prefill" if peak.top.part in PREFILL else "decode",
        nbytes=peak.nbytes,
        workspace_bytes=peak.workspace_bytes,
        largest_buffer_bytes=peak.largest_buffer_bytes,
        largest_buffer=peak.top.operation,
        explanation=peak_lines(peak),
        prefill_bytes=max(prefill, default=peak.weight_bytes),
        decode_bytes=max(decode, default=peak.weight_bytes),
        call_bytes={
            call.part: peak.weight_bytes + max(call.curve) for call in peak.calls if call.curve
        },
        held_bytes=peak.held[most],
        held_phase="prefill" if most in PREFILL else "decode",
        batch_bytes=peak.top.batch_bytes,
    )


class _Traced(NamedTuple):
    workspace_bytes: int
    largest_buffer_bytes: int
    largest_buffer: str
    phase: Phase
    held_bytes: int
    """Of the workspace, with what MLX keeps of freed buffers."""


_NOTHING = _Traced(0, 0, "", "prefill", 0)


class TracedWorkspace(Struct, frozen=True, eq=False):
    """The workspace of a class between traced prompts."""

    trace: ModelTrace
    max_context: int | None
    """The longest context of the model, in tokens."""

    def converted(self, quantize: Quantization) -> "TracedWorkspace":
        """Return the workspace of the class with its weights converted."""
        return replace(self, trace=self.trace.converted(quantize))

    def peak(
        self, workload: Workload, device: Device | None, versions: MlxVersions, kept_bytes: int
    ) -> PeakMoment:
        """Return the peak of a workload that keeps ``kept_bytes`` of weights, caches and states.

        Raises:
            UnsupportedError: when mlx-lm cannot run the workload, or its graphs are too large.
        """
        found = self._at_batch(workload, (device, versions))
        return PeakMoment(
            phase=found.phase,
            nbytes=kept_bytes + found.workspace_bytes,
            workspace_bytes=found.workspace_bytes,
            largest_buffer_bytes=found.largest_buffer_bytes,
            largest_buffer=found.largest_buffer,
            explanation=(
                f"peak = kept {kept_bytes:,} + workspace between traced prompts"
                f" {found.workspace_bytes:,} = {kept_bytes + found.workspace_bytes:,}",
            ),
            held_bytes=kept_bytes + found.held_bytes,
        )

    def _at_batch(self, workload: Workload, target: _Target) -> _Traced:
        batch = workload.batch
        if batch <= _FEW:
            return self._at_prompt(workload, target)
        many = self._at_prompt(replace(workload, batch=_BATCH), target)
        # Beyond, every array grows with the batch at most, and MLX runs no further ahead.
        low, start = _NOTHING, 0
        if batch <= _BATCH:
            low, start = self._at_prompt(replace(workload, batch=_FEW), target), _FEW
        return _between(low, many, batch, (start, _BATCH))

    def _at_prompt(self, workload: Workload, target: _Target) -> _Traced:
        tokens = workload.prompt_tokens
        corners = self._corners(workload)
        after = bisect_left(corners, tokens)
        high = self._run(replace(workload, prompt_tokens=corners[after]), target)
        # The shortest one is taken for all below it.
        if after == 0 or tokens == corners[after]:
            return high
        low = self._run(replace(workload, prompt_tokens=corners[after - 1]), target)
        line = _between(low, high, tokens, (corners[after - 1], corners[after]))
        more = ceil_div(line.workspace_bytes, _RAISED)
        return line._replace(
            workspace_bytes=line.workspace_bytes + more, held_bytes=line.held_bytes + more
        )

    def _corners(self, workload: Workload) -> list[int]:
        """Return the prompts to trace, in ascending order; the last is not below the workload's."""
        # A chunk of its own length, a whole one, and one after others.
        step, images = workload.prefill_step, workload.image_tokens
        lengths = {images + length for length in (_STEP, step)}
        if workload.kv_bits is not None:
            # The last before the caches are quantised: a class may not run over them then.
            start = workload.quantized_kv_start
            ends = start - 1 - workload.max_tokens, start + _STEP
            lengths |= {length for length in ends if length > images}
        limit = round_down(self.max_context or _UNBOUNDED, _STEP)
        # A prompt beyond the limit of the model is traced itself.
        longest = max(limit, round_up(workload.prompt_tokens, _STEP))
        # The more a layer takes, the fewer run at once: a line is good for a few times its start.
        tokens = 2 * step
        while images + tokens < longest:
            lengths.add(images + tokens)
            tokens *= _GROWTH
        return sorted({min(length, longest) for length in (*lengths, longest)})

    def _run(self, workload: Workload, target: _Target) -> _Traced:
        moment = self.trace.moment(workload, *target)
        if moment is None:
            step = workload.prefill_step // _SHORTER
            if step < _SHORTEST_STEP:
                raise UnsupportedError(self.trace.failure(workload, *target))
            # No array of a chunk grows faster than its tokens, with as many before its end.
            shorter = self._run(replace(workload, prefill_step=step), target)
            return _between(_NOTHING, shorter, _SHORTER, (0, 1))
        assert moment.held_bytes is not None
        return _Traced(
            moment.workspace_bytes,
            moment.largest_buffer_bytes,
            moment.largest_buffer,
            moment.phase,
            moment.workspace_bytes + moment.held_bytes - moment.nbytes,
        )


def _between(low: _Traced, high: _Traced, position: int, ends: tuple[int, int]) -> _Traced:
    """Return the line through two traces at a position, rounded up."""
    start, end = ends

    def line(first: int, last: int) -> int:
        return first + ceil_div((last - first) * (position - start), end - start)

    workspace = line(low.workspace_bytes, high.workspace_bytes)
    largest = line(low.largest_buffer_bytes, high.largest_buffer_bytes)
    held = line(low.held_bytes, high.held_bytes)
    return high._replace(workspace_bytes=workspace, largest_buffer_bytes=largest, held_bytes=held)


def described_by_class(trace: ModelTrace, device: Device | None) -> Subject:
    """Return a checkpoint as its class describes it, with a workspace between traced prompts.

    Raises:
        MachineError: when a package of the class is not installed.
        UnsupportedError: when there is no such class, or what it holds is not described.
    """
    checkpoint, quantize = trace.checkpoint, trace.quantize
    model = trace.description(device)
    plan = QuantizationPlan(quantize, converting=True) if quantize else None
    plan = plan or declared(checkpoint.config, model, checkpoint.config_name).plan
    footprint = weights_by_trace(trace, model, plan, device)
    source = Interpolated(TracedWorkspace(trace, model.max_context))
    return Subject(checkpoint, model, footprint, device, source)


def weights_by_trace(
    trace: ModelTrace, model: Model, plan: QuantizationPlan | None, device: Device | None
) -> WeightFootprint:
    """Return the weights as the class of an undescribed model holds them; ``plan`` packs them.

    Towers are not among those that are loaded: a runtime for images adds them.
    """
    weights = trace.weights(device)
    of_files = trace.quantize is None and trace.rank is None
    tensors = trace.checkpoint.tensors if of_files else None
    named = weights if tensors is None else {t.name: t.nbytes for t in tensors}
    modules, parts = dict(model.all_modules()), {part.value: 0 for part in Part}

    def module_of(name: str) -> Module | None:
        return modules.get(name.rpartition(".")[0]) or modules.get(name)

    for name, nbytes in named.items():
        module = module_of(name)
        parts[(module.part if module else part_of(name)).value] += nbytes
    towers = {name for name in weights if (module := module_of(name)) and not module.loaded}
    footprint = WeightFootprint(
        nbytes=sum(named.values()),
        by_part=parts,
        parameters=sum(module.elements + module.bias for module in modules.values()),
        sizes=Counter(size for name, size in weights.items() if name not in towers),
        basis="exact" if trace.checkpoint.tensors and not trace.quantize else "traced",
        plan=plan,
        unloaded_by_part={Part.VISION.value: parts[Part.VISION.value]} if towers else {},
    )
    method = None if trace.quantize else trace.unread_format(device)
    if method is None and trace.checkpoint.tensors is None and plan is None:
        return bounded_by_name(footprint, trace.checkpoint.id, model.dtype)
    if method is None:
        return footprint
    text = (
        f"quantisation method {method!r}: how mlx-lm stores it is not described; the"
        " weights are bounded by the unquantised model"
    )
    return bounded(footprint, "dequantised", text)
