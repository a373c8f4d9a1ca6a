"""The facade: a sizing and a workload in, an Estimate out."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from memfit.estimators.runtimes.interface import Engine, Figures
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.registry import LLAMA_CPP, MLX_LM, Runtime
from memfit.estimators.runtimes.measured import MeasuredEngine
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.sizing.recommend import longest_prompt, recommend
from memfit.estimators.results.estimate import (
    KV,
    Basis,
    Component,
    Components,
    CurvePoint,
    DeviceSummary,
    Estimate,
    ModelSummary,
    Note,
    Plots,
    RunCall,
    RuntimeSummary,
    Weights,
    WorkloadSummary,
    Workspace,
)
from memfit.estimators.sizing.sized_model import Sizing
from memfit.estimators.runtimes.mlx_lm_trace import TraceEngine, compared, run_calls, untraced
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload

SHORTEST_PLOTTED = 1024


def estimate(
    sizing: Sizing, workload: Workload, *, runtime: Runtime, units: Units = Units.GB
) -> Estimate:
    """Return what a workload takes and what follows; ``units`` are of the sentences in it.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    _require_engine(sizing, runtime)
    figures = sizing.at(workload)
    verdict, exceeded = judge(sizing.need(workload), sizing.device)
    return Estimate(
        memfit_version=__version__,
        model=model_summary(sizing),
        workload=WorkloadSummary(**asdict(workload)),
        runtime=RuntimeSummary(runtime.name, runtime.version),
        device=device_summary(sizing.device) if sizing.device else None,
        components=_components(sizing, workload, figures),
        peak_bytes=figures.moment.nbytes + sizing.draft_bytes(workload),
        peak_phase=figures.moment.phase,
        verdict=verdict,
        exceeded=exceeded,
        recommendation=recommend(sizing, workload, units),
        assumptions=tuple(_assumptions(sizing, workload, units)),
        notes=tuple(_notes(sizing, workload, units)),
        method=_method(sizing.engine),
    )


def _method(engine: Engine) -> str:
    if isinstance(engine, MeasuredEngine):
        return "measure"
    return "trace" if isinstance(engine, TraceEngine) else "formula"


def _require_engine(sizing: Sizing, runtime: Runtime) -> None:
    """Hold the runtime that was asked for against the one the checkpoint is for."""
    if sizing.engine.runtime == runtime.name:
        return
    why = {
        MLX_LM: "loads no GGUF file; convert the model, or size it for",
        LLAMA_CPP: "loads GGUF files only; convert the model, or size it for",
    }
    text = why.get(runtime.name, "is not described for estimates; size it for")
    raise UnsupportedError(f"{sizing.checkpoint.id}: {runtime.name} {text} {sizing.engine.runtime}")


def plots(sizing: Sizing, workload: Workload) -> Plots:
    """Return memory against context, and over the operations of the run where it is traced."""
    run: tuple[RunCall, ...] = ()
    if isinstance(sizing.engine, TraceEngine):
        run = run_calls(sizing.engine.run(workload, sizing.device).peak)
    points = curve(sizing, workload)
    return Plots(points, run, "formula" if points and sizing.searches else None)


def curve(sizing: Sizing, workload: Workload) -> tuple[CurvePoint, ...]:
    """Return memory at doubling prompt lengths up to the model's limit, or a million tokens.

    It ends before a length that the runtime cannot run.
    """
    searching = sizing.searching()
    if searching is None:
        return ()
    return tuple(_points(searching, workload, longest_prompt(sizing.model.max_context, workload)))


def _points(sizing: Sizing, workload: Workload, most: int) -> Iterator[CurvePoint]:
    tokens = 0
    while tokens < most:
        tokens = min(2 * tokens or SHORTEST_PLOTTED, most)
        try:
            yield _point(sizing, workload, tokens)
        except UnsupportedError:
            return


def _point(sizing: Sizing, workload: Workload, tokens: int) -> CurvePoint:
    prompt = replace(workload, prompt_tokens=tokens, max_tokens=0)
    figures = sizing.at(prompt)
    return CurvePoint(
        context_tokens=tokens,
        weights_bytes=sizing.resident_bytes,
        cache_bytes=figures.kv.nbytes + figures.ssm_bytes,
        workspace_bytes=figures.moment.workspace_bytes,
        peak_bytes=sizing.need(prompt).peak_bytes,
    )


def model_summary(sizing: Sizing) -> ModelSummary:
    """Return what a result says of the model."""
    model, weighed = sizing.model, sizing.weighed
    return ModelSummary(
        id=sizing.checkpoint.id,
        source=sizing.checkpoint.source,
        revision=sizing.checkpoint.revision,
        model_type=model.model_type,
        parameters=weighed.parameters,
        bits_per_weight=round(8 * weighed.nbytes / weighed.parameters, 3),
        max_context=model.max_context,
        layers=model.layer_kinds(),
    )


def device_summary(device: Device) -> DeviceSummary:
    """Return what a result says of the device."""
    return DeviceSummary(
        name=device.name,
        backend=device.backend,
        memory_bytes=device.memory_bytes,
        working_set_bytes=device.working_set_bytes,
        max_buffer_bytes=device.max_buffer_bytes,
        source=device.source,
        used_by_others_bytes=device.used_by_others_bytes,
    )


def _components(sizing: Sizing, workload: Workload, figures: Figures) -> Components:
    weighed, kv = sizing.weighed, figures.kv
    draft = sizing.draft_bytes(workload)
    kept: Basis = "traced" if isinstance(sizing.engine, TraceEngine) else "exact"
    weights, loaded = weighed.basis, weighed.loaded_bytes
    if isinstance(sizing.engine, MeasuredEngine):
        kept = weights = "measured"
        loaded = sizing.engine.measurement.loaded.weights_bytes
    return Components(
        weights=Weights(
            bytes=weighed.nbytes,
            basis=weights,
            by_part=weighed.by_part,
            loaded_bytes=loaded,
            resident_bytes=sizing.resident_bytes,
        ),
        kv=KV(
            bytes=kv.nbytes,
            basis=kept,
            held_bytes=kv.held_bytes,
            bytes_per_token=kv.bytes_per_token,
            held_tokens=kv.held_tokens,
            allocated_tokens=kv.allocated_tokens,
        ),
        ssm=Component(figures.ssm_bytes, kept),
        workspace=Workspace(figures.moment.workspace_bytes, *sizing.workspace_basis(workload)),
        margin=Component(sizing.margin_bytes, "exact"),
        draft=Component(draft, "bound") if draft else None,
    )


def _assumptions(sizing: Sizing, workload: Workload, units: Units) -> Iterator[str]:
    if isinstance(sizing.engine, TraceEngine):
        yield f"traced with {sizing.engine.versions()}"
    if isinstance(sizing.engine, MeasuredEngine):
        from memfit.estimators.sizing.measurement_lookup import measured_assumption

        yield measured_assumption(sizing.engine.measurement, units)
    if sizing.checkpoint.tensors is None:
        yield f"floating parameters are {sizing.model.dtype}, from the config"
    if sizing.runtime == LLAMA_CPP and sizing.checkpoint.source == "gguf":
        from memfit.estimators.runtimes.llama_cpp.runtime import llama_assumptions

        yield from llama_assumptions(sizing.engine, workload)
    elif sizing.device is None:
        yield "no device is named: the workspace follows MLX's rules for a Metal GPU of Max class"
    if sizing.runtime != MLX_LM:
        from memfit.estimators.runtimes.ruled import runtime_assumptions

        yield from runtime_assumptions(sizing.engine, sizing.checkpoint)
    if workload.batch > 1:
        yield f"{workload.batch} sequences of equal length run together"
    if sizing.draft:
        yield "the draft model's own peak is added whole: an upper bound"


def _notes(sizing: Sizing, workload: Workload, units: Units) -> Iterator[Note]:
    checkpoint, model = sizing.checkpoint, sizing.model
    yield from sizing.weighed.notes
    yield from sizing.notes
    for warning in checkpoint.warnings:
        yield Note("warning", "checkpoint", warning)
    for left in checkpoint.left_out:
        size = format_bytes(left.nbytes, units)
        yield Note("info", "left-out", f"{left.name} ({size}) is not counted: {left.reason}")
    for text in model.notes:
        yield Note("info", "model", text)
    if sizing.weighed.unloaded_bytes:
        size = format_bytes(sizing.weighed.unloaded_bytes, units)
        text = f"{size} of the checkpoint are not loaded by {sizing.engine.runtime}"
        yield Note("info", "not-loaded", text)
    yield from workload_notes(sizing, workload)
    if isinstance(sizing.engine, TraceEngine):
        yield from compared(sizing.engine, model, workload, sizing.at(workload))
        yield from untraced(sizing.engine, workload, sizing.device)
    if isinstance(sizing.engine, MeasuredEngine):
        from memfit.estimators.sizing.measurement_lookup import measured_differences

        yield from measured_differences(
            sizing.engine, model, sizing.weighed, workload, sizing.device
        )
    if sizing.runtime != MLX_LM:
        from memfit.estimators.runtimes.ruled import runtime_notes

        yield from runtime_notes(sizing.engine, model, sizing.weighed, workload, units)
    if sizing.device:
        yield from _device_notes(sizing.device, sizing.at(workload), units)


def _device_notes(device: Device, figures: Figures, units: Units) -> Iterator[Note]:
    largest, moment = device.max_buffer_bytes, figures.moment
    if largest is not None and moment.largest_buffer_bytes > largest:
        text = (
            f"one allocation, {moment.largest_buffer}, takes"
            f" {format_bytes(moment.largest_buffer_bytes, units)}, above"
            f" {format_bytes(largest, units)}, the largest the device gives"
        )
        yield Note("warning", "max-buffer", text)
    if device.note:
        yield Note("info", "device", device.note)


def workload_notes(sizing: Sizing, workload: Workload) -> Iterator[Note]:
    """Yield what the reader must know of a model under this workload."""
    model = sizing.model
    if model.max_context and workload.total_tokens > model.max_context:
        text = f"{workload.total_tokens} tokens exceed the model's own limit {model.max_context}"
        yield Note("warning", "beyond-context", text)
    if workload.max_kv_size and model.makes_own_cache:
        text = f"mlx-lm ignores max_kv_size for {model.model_type}: the class makes its own cache"
        yield Note("warning", "max-kv-size", text)
    if workload.kv_bits and workload.total_tokens < workload.quantized_kv_start:
        text = (
            f"the cache stays unquantised: mlx-lm quantises it from"
            f" {workload.quantized_kv_start} tokens on"
        )
        yield Note("warning", "kv-start", text)
