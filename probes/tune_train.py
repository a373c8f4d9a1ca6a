"""``memfit tune train``: a few steps of mlx-lm's trainer, compared with the traced ones."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict

from memfit.estimators.base.dtypes import BITS
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.quantities import Bytes, Count, Number, Tokens
from memfit.estimators.base.recipe import Recipe
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.mlx.versions import MlxVersions, parse_version
from memfit.estimators.results.estimate import DeviceSummary, Note
from memfit.estimators.results.result import Result
from memfit.estimators.runtimes.budget import Need
from memfit.estimators.runtimes.measurement import MeasuredTraining, Measurement, Run
from memfit.estimators.sizing.estimate import device_summary
from memfit.estimators.sizing.training_steps import TracedSteps
from memfit.probes.preflight import RefusedError, limited, memory_obstacle
from memfit.probes.process import ModelProcess
from memfit.probes.session import new_measurement
from memfit.probes.store import Store
from memfit.probes.training_runner import TrainingRunner
from memfit.probes.tune import measuring_device

PhaseName = Literal["validation", "first_step", "later_steps"]


class TrainRequest(Struct, frozen=True, kw_only=True):
    model: str
    checkpoint: Checkpoint
    recipe: Recipe
    updates: int
    memory_limit_bytes: int | None
    margin_bytes: int
    force: bool
    units: Units = Units.GB


class TrainedPhase(Struct, frozen=True, kw_only=True):
    """The largest moment of one part of a run."""

    phase: PhaseName
    estimated_bytes: Bytes
    measured_bytes: Bytes
    ratio: Number
    """The estimate divided by the measurement."""


class TrainTuneResult(Result, frozen=True, kw_only=True, tag="memfit.tune-train/1"):
    """The result of ``memfit tune train``."""

    model: str
    recipe: Recipe
    sequence_tokens: Tokens
    steps: Count
    device: DeviceSummary
    versions: Mapping[str, str]
    weights_bytes: Bytes
    phases: tuple[TrainedPhase, ...]
    measurement_id: str | None
    """None where it could not be saved; ``notes`` say why."""
    notes: tuple[Note, ...]


def tune_train(
    request: TrainRequest, start: Callable[..., ModelProcess], store: Store
) -> TrainTuneResult:
    """Return the estimate and the measurement of a recipe on this machine; it is saved.

    Raises:
        RefusedError: when the estimate does not fit, unless it is forced.
        UnsupportedError: when mlx-lm cannot train the class, or its step cannot be traced.
        ProbeStopped: when the process died.
    """
    recipe, tokens = request.recipe, request.recipe.max_seq_length
    with start(task="train") as process:
        device = measuring_device(process.versions)
        found = (process.versions["mlx"], process.versions["mlx_lm"])
        versions = MlxVersions(*map(parse_version, found))
        steps = TracedSteps(request.checkpoint, _dtype(request.checkpoint), device, versions)
        peak = steps.peak(recipe, tokens, validated=tokens)
        assert peak.first is not None
        assert peak.validation is not None
        estimated = (peak.validation.nbytes, peak.first.nbytes, peak.later.nbytes)
        need = Need(max(estimated) + request.margin_bytes, peak.later.largest_buffer_bytes)
        machine = limited(device, request.memory_limit_bytes)
        if not request.force and (why := memory_obstacle(need, machine, request.units)):
            raise RefusedError(f"{request.model}: {why}")
        loaded = process.load()
        run = process.call(TrainingRunner.train, recipe, tokens, request.updates)
    training = MeasuredTraining(recipe=recipe, **asdict(run))
    measurement = new_measurement(
        request.checkpoint,
        device,
        process.versions,
        workload=Workload(prompt_tokens=tokens, batch=recipe.batch_size),
        loaded=loaded,
        runs=(_without_generation(training.peak_bytes),),
        training=training,
    )
    notes = tuple(_saved(measurement, store))
    measured = (run.validation_bytes, run.first_step_bytes, run.later_steps_bytes)
    names: tuple[PhaseName, ...] = ("validation", "first_step", "later_steps")
    return TrainTuneResult(
        model=request.model,
        recipe=recipe,
        sequence_tokens=tokens,
        steps=run.steps,
        device=device_summary(device),
        versions=process.versions,
        weights_bytes=loaded.weights_bytes,
        phases=tuple(
            TrainedPhase(
                phase=name,
                estimated_bytes=said,
                measured_bytes=found_bytes,
                ratio=round(said / max(1, found_bytes), 4),
            )
            for name, said, found_bytes in zip(names, estimated, measured, strict=True)
        ),
        measurement_id=None if notes else measurement.id,
        notes=notes,
    )


def _saved(measurement: Measurement, store: Store) -> Iterator[Note]:
    try:
        store.save(measurement)
    except InputError as error:
        yield Note("warning", "not-kept", f"the measurement could not be saved: {error}")


def _without_generation(peak_bytes: int) -> Run:
    """Return a run with nothing but a peak."""
    return Run(
        prefill_kv_bytes=0,
        prefill_kv_held_bytes=0,
        prefill_ssm_bytes=0,
        kv_bytes=0,
        kv_held_bytes=0,
        ssm_bytes=0,
        prefill_peak_bytes=peak_bytes,
        decode_peak_bytes=peak_bytes,
        first_token_ns=0,
        decode_ns=0,
        process_bytes=None,
    )


def _dtype(checkpoint: Checkpoint) -> str:
    """Return the type of parameters that no header describes: none are left."""
    known = (tensor.dtype for tensor in checkpoint.tensors or ())
    return next((dtype for dtype in known if dtype in BITS), "BF16")
