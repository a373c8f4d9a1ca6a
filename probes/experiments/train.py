"""``memfit tune train``: a few steps of mlx-lm's trainer, compared with the traced ones."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict

from memfit.estimators.base.dtypes import BITS
from memfit.estimators.base.units import Bytes, Count, Number, Tokens
from memfit.estimators.base.workload import Recipe, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.mlx.versions import MlxVersions, parse_version
from memfit.estimators.results.estimate import DeviceSummary, Note
from memfit.estimators.results.result import Result
from memfit.estimators.runtimes.measurement import MeasuredTraining, Run
from memfit.estimators.runtimes.runtime import Need
from memfit.estimators.sizing.estimate import device_summary
from memfit.estimators.sizing.training_steps import TracedSteps
from memfit.probes.experiments.base import Experiment, RunRequest, Start
from memfit.probes.preflight import require_memory
from memfit.probes.store import Store
from memfit.probes.training_runner import TrainingRunner

_NEAR = 0.05
PhaseName = Literal["validation", "first_step", "later_steps"]


class TrainRequest(RunRequest, frozen=True, kw_only=True):
    """The recipe to train with, and for how long."""

    recipe: Recipe
    updates: int
    """Updates of the optimizer after the first one."""


class TrainedPhase(Struct, frozen=True, kw_only=True):
    """The largest moment of one part of a run."""

    phase: PhaseName
    estimated_bytes: Bytes
    measured_bytes: Bytes
    ratio: Number
    """The estimate divided by the measurement."""

    @property
    def is_near(self) -> bool:
        """Whether the estimate is within 5 % of the measurement."""
        return abs(self.ratio - 1) <= _NEAR


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

    @property
    def largest(self) -> TrainedPhase:
        """The phase of the largest measured moment."""
        return max(self.phases, key=lambda each: each.measured_bytes)


def tune_train(request: TrainRequest, *, start: Start, store: Store) -> TrainTuneResult:
    """Return the estimate and the measurement of a recipe on this machine; it is saved.

    Raises:
        RefusedError: when the estimate does not fit, unless it is forced.
        UnsupportedError: when mlx-lm cannot train the class, or its step cannot be traced.
        ProbeStopped: when the process died.
    """
    return _TrainExperiment(request=request, start=start, save=store.save).result()


class _TrainExperiment(Experiment[TrainRequest], kw_only=True):
    def result(self) -> TrainTuneResult:
        recipe, tokens = self.request.recipe, self.request.recipe.max_seq_length
        with self.start(task="train") as process:
            whole = self.take_machine(process.versions)
            estimated = self._estimated(tokens)
            loaded = process.load()
            run = process.call(TrainingRunner.train, recipe, tokens, self.request.updates)
        training = MeasuredTraining(recipe=recipe, **asdict(run))
        id = self.saved_id(
            Workload(prompt_tokens=tokens, batch=recipe.batch_size),
            loaded=loaded,
            runs=(_without_generation(training.peak_bytes),),
            training=training,
        )
        return TrainTuneResult(
            model=self.request.checkpoint.id,
            recipe=recipe,
            sequence_tokens=tokens,
            steps=run.steps,
            device=device_summary(whole),
            versions=self.versions,
            weights_bytes=loaded.weights_bytes,
            phases=tuple(
                TrainedPhase(
                    phase=phase,
                    estimated_bytes=nbytes,
                    measured_bytes=(measured := getattr(run, f"{phase}_bytes")),
                    ratio=round(nbytes / max(1, measured), 4),
                )
                for phase, nbytes in estimated.items()
            ),
            measurement_id=id,
            notes=self.all_notes,
        )

    def _estimated(self, tokens: int) -> dict[PhaseName, int]:
        """Return the traced peaks, which have to fit this machine now."""
        request = self.request
        installed = (parse_version(self.versions[name]) for name in ("mlx", "mlx_lm"))
        dtype, versions = _dtype(request.checkpoint), MlxVersions(*installed)
        steps = TracedSteps(request.checkpoint, dtype, self.device, versions)
        peak = steps.peak(request.recipe, tokens, validated=tokens)
        assert peak.first is not None
        assert peak.validation is not None
        estimated: dict[PhaseName, int] = {
            "validation": peak.validation.nbytes,
            "first_step": peak.first.nbytes,
            "later_steps": peak.later.nbytes,
        }
        need = Need(max(estimated.values()) + request.margin_bytes, peak.later.largest_buffer_bytes)
        if not request.force:
            require_memory(request.checkpoint.id, need, self.device, request.units)
        return estimated


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
