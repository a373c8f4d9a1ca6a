"""Run workloads one after another, compare each with its estimate, save complete measurements."""

from msgspec import Struct, field

from memfit.estimators.base.errors import MachineError, MemfitError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Loaded, Measurement, Run
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.experiments.base import Experiment, RunRequest
from memfit.probes.figures import (
    EstimatedFigure,
    SwiftBytes,
    estimated_figures,
    measured_figures,
    paired_figures,
    partial_figures,
)
from memfit.probes.measurement_json import measurement_id
from memfit.probes.model_runner import ModelRunner
from memfit.probes.process import ProbeStopped
from memfit.probes.result import Point
from memfit.probes.speed import median_speed
from memfit.probes.worker import Worker

REPEATS = 3
STEPS = REPEATS + 2
"""The runs of a point: a warm-up, the repeats, and one by mlx-swift-lm's rule."""


class Points(Experiment[RunRequest], kw_only=True):
    """A sized model and the worker that runs the same model."""

    sized: SizedModel
    worker: Worker
    steps_per_run: int = 1
    """Steps of the progress that each run is."""
    finished_runs: int = 0
    loaded: Loaded | None = None

    def measure(
        self, workload: Workload, *, repeats: int = REPEATS, wired_limit_bytes: int | None = None
    ) -> Point:
        """Run a workload; a point that fails keeps the figures it reached.

        Repeats follow a run that is not timed: as in mlx_lm.benchmark, it compiles kernels.

        Raises:
            CheckpointError: when the weights do not match the config.
            UnsupportedError: when mlx-lm has no class for the model, or fails on the workload.
        """
        state = _RunState(workload, wired_limit_bytes)
        try:
            self.loaded = self.worker.load()
        except ProbeStopped as error:
            state.failure = error
        else:
            self._run(state, repeats)
        return self._point(state, self.loaded, self._saved_id(state))

    def measure_if_supported(self, workload: Workload, *, repeats: int = REPEATS) -> Point:
        """Run a workload that the user did not ask for: an unsupported one is skipped.

        Raises:
            CheckpointError: when the weights do not match the config.
        """
        try:
            return self.measure(workload, repeats=repeats)
        except UnsupportedError as error:
            return self.skipped(workload, str(error))

    def skipped(self, workload: Workload, reason: str) -> Point:
        """Return the point of a workload that is not run."""
        estimates = self._estimates(workload)
        return Point(
            workload=workload,
            status="skipped",
            reason=reason,
            repeats=0,
            estimated_peak_bytes=estimates["peak"].nbytes if estimates else None,
            peak_bytes=None,
            figures=paired_figures({}, estimates),
            speed=None,
            measurement_id=None,
        )

    def from_measurement(self, measurement: Measurement) -> Point:
        """Return the point of an earlier measurement; nothing is run."""
        state = _RunState(
            measurement.workload, measurement.wired_limit_bytes, list(measurement.runs)
        )
        state.swift = measurement.swift_workspace_bytes, measurement.swift_kv_bytes
        state.warm_up = measurement.warm_up
        return self._point(state, measurement.loaded, measurement.id)

    def id_of(self, workload: Workload) -> str:
        """Return the id that a measurement of a workload has, or will have."""
        return measurement_id(self.key_of(workload))

    def _run(self, state: "_RunState", repeats: int) -> None:
        try:
            if repeats == REPEATS:
                state.warm_up = self._run_once(state)
            for _ in range(repeats):
                state.runs.append(self._run_once(state))
        except MachineError as error:
            state.failure = error
            return
        if repeats == REPEATS:
            state.swift = self._swift_workspace(state.workload)
            self._finish_run()

    def _run_once(self, state: "_RunState") -> Run:
        run = self.worker.call(ModelRunner.run, state.workload, state.wired_limit_bytes)
        self._finish_run()
        return run

    def _finish_run(self) -> None:
        self.finished_runs += 1
        self.progress.advance(self.steps_per_run)

    def _swift_workspace(self, workload: Workload) -> SwiftBytes:
        if workload.batch > 1:  # mlx-swift-lm's tune runs one sequence
            return None, None
        # This rule evaluates logits that generation never holds, so it can run out of memory.
        try:
            return self.worker.call(ModelRunner.swift_workspace, workload)
        except (MachineError, UnsupportedError):
            return None, None

    def _point(self, state: "_RunState", loaded: Loaded | None, id: str | None) -> Point:
        estimates = self._estimates(state.workload)
        values = measured_figures(loaded, state.runs, state.swift, state.warm_up)
        if isinstance(state.failure, ProbeStopped):
            values = {**partial_figures(state.failure.partial_figures), **values}
        figures = paired_figures(values, estimates)
        peaks = [f.measured_bytes for f in figures if f.name in ("peak", "warm_up_peak")]
        return Point(
            workload=state.workload,
            status="failed" if state.failure else "measured",
            reason=str(state.failure) if state.failure else None,
            repeats=len(state.runs),
            estimated_peak_bytes=estimates["peak"].nbytes if estimates else None,
            peak_bytes=max(filter(None, peaks), default=None),
            figures=figures,
            speed=median_speed(state.workload, state.runs),
            measurement_id=id,
            wired_limit_bytes=state.wired_limit_bytes,
        )

    def _estimates(self, workload: Workload) -> dict[str, EstimatedFigure]:
        try:
            return estimated_figures(self.sized, workload)
        except UnsupportedError:
            return {}

    def _saved_id(self, state: "_RunState") -> str | None:
        """Save a complete measurement; return its id, None when it is not saved."""
        if self.loaded is None or len(state.runs) < REPEATS:
            return None
        return self.saved_id(
            state.workload,
            wired_limit_bytes=state.wired_limit_bytes,
            loaded=self.loaded,
            runs=tuple(state.runs),
            warm_up=state.warm_up,
            swift_workspace_bytes=state.swift[0],
            swift_kv_bytes=state.swift[1],
        )


class _RunState(Struct):
    """What is known so far about one workload."""

    workload: Workload
    wired_limit_bytes: int | None
    runs: list[Run] = field(default_factory=list)
    warm_up: Run | None = None
    swift: SwiftBytes = (None, None)
    failure: MemfitError | None = None
