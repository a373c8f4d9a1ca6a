"""Workloads run one at a time, each beside its estimate; what is whole is kept for estimates."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone

from memfit.estimators.base.errors import InputError, MachineError, MemfitError, UnsupportedError
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.fingerprint import fingerprint_of
from memfit.estimators.runtimes.measurement import Loaded, Measurement, Run
from memfit.estimators.sizing.measurement_lookup import machine_name
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.figures import Estimated, estimated, measured, reached, side_by_side, speed
from memfit.probes.measurement_json import measurement_id
from memfit.probes.process import ProbeStopped
from memfit.probes.result import Point
from memfit.probes.worker import Worker

REPEATS = 3


def silent() -> None:
    """Say nothing of a step that is done."""


@dataclass(slots=True)
class Bench:
    """A sizing and the worker that runs the same model.

    ``keep`` is given every measurement of `REPEATS` repeats, ``tell`` is called after each run.
    What could not be kept is shown all the same; ``unkept`` says why.
    """

    sized: SizedModel
    worker: Worker
    keep: Callable[[Measurement], None]
    tell: Callable[[], None] = silent
    loaded: Loaded | None = None
    unkept: str | None = None

    def measure(
        self,
        workload: Workload,
        *,
        repeats: int = REPEATS,
        wired_limit_bytes: int | None = None,
    ) -> Point:
        """Run a workload; a point that fails on the way keeps the figures it reached.

        Raises:
            CheckpointError: when the weights do not match the config.
            UnsupportedError: when mlx-lm has no class for the model, or it fails on the workload.
        """
        ran = _Ran(workload, wired_limit_bytes)
        try:
            self.loaded = self.worker.load()
        except ProbeStopped as error:
            ran.failure = error
        else:
            self._run(ran, repeats)
        return self._point(ran)

    def measure_if_supported(self, workload: Workload, *, repeats: int = REPEATS) -> Point:
        """Run a workload beside the one that was asked for: what cannot be run is skipped.

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
            figures=side_by_side({}, estimates),
            speed=None,
            measurement_id=None,
        )

    def recalled(self, measurement: Measurement) -> Point:
        """Return the point of a measurement that was made before; nothing is run."""
        ran = _Ran(measurement.workload, measurement.wired_limit_bytes, list(measurement.runs))
        ran.swift_bytes = measurement.swift_workspace_bytes
        return self._shown(ran, measurement.loaded, measurement.id)

    def id_of(self, workload: Workload, wired_limit_bytes: int | None = None) -> str:
        """Return the id that a measurement of a workload has, or will have."""
        device, versions = self.sized.device, self.worker.versions
        return measurement_id(
            fingerprint=fingerprint_of(self.sized.checkpoint),
            device=machine_name(device) if device else "",
            mlx_version=versions["mlx"],
            mlx_lm_version=versions["mlx_lm"],
            workload=workload,
            wired_limit_bytes=wired_limit_bytes,
        )

    def _run(self, ran: "_Ran", repeats: int) -> None:
        try:
            for _ in range(repeats):
                ran.runs.append(self.worker.run(ran.workload, wired_limit_bytes=ran.wired))
                self.tell()
        except MachineError as error:
            ran.failure = error
            return
        if repeats == REPEATS:
            ran.swift_bytes = self._swift(ran.workload)
            self.tell()

    def _swift(self, workload: Workload) -> int | None:
        # It evaluates logits that generation never holds: what it takes may not be there.
        try:
            return self.worker.swift_workspace(workload)
        except (MachineError, UnsupportedError):
            return None

    def _point(self, ran: "_Ran") -> Point:
        kept = self._kept(ran) if len(ran.runs) == REPEATS else None
        return self._shown(ran, self.loaded, kept.id if kept else None)

    def _shown(self, ran: "_Ran", loaded: Loaded | None, id: str | None) -> Point:
        estimates = self._estimates(ran.workload)
        values = measured(loaded, ran.runs, ran.swift_bytes)
        if isinstance(ran.failure, ProbeStopped):
            values = {**reached(ran.failure.reached), **values}
        figures = side_by_side(values, estimates)
        return Point(
            workload=ran.workload,
            status="failed" if ran.failure else "measured",
            reason=str(ran.failure) if ran.failure else None,
            repeats=len(ran.runs),
            estimated_peak_bytes=estimates["peak"].nbytes if estimates else None,
            peak_bytes=next((f.measured_bytes for f in figures if f.name == "peak"), None),
            figures=figures,
            speed=speed(ran.workload, ran.runs),
            measurement_id=id,
            wired_limit_bytes=ran.wired,
        )

    def _estimates(self, workload: Workload) -> dict[str, Estimated]:
        try:
            return estimated(self.sized, workload)
        except UnsupportedError:
            return {}

    def _kept(self, ran: "_Ran") -> Measurement | None:
        device = self.sized.device
        if device is None or self.loaded is None:
            return None
        versions = self.worker.versions
        measurement = Measurement(
            id=self.id_of(ran.workload, ran.wired),
            measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            memfit_version=__version__,
            mlx_version=versions["mlx"],
            mlx_lm_version=versions["mlx_lm"],
            model=self.sized.checkpoint.id,
            fingerprint=fingerprint_of(self.sized.checkpoint),
            device=machine_name(device),
            backend=device.backend,
            workload=ran.workload,
            wired_limit_bytes=ran.wired,
            loaded=self.loaded,
            runs=tuple(ran.runs),
            swift_workspace_bytes=ran.swift_bytes,
        )
        try:
            self.keep(measurement)
        except InputError as error:
            self.unkept = str(error)
            return None
        return measurement


@dataclass(slots=True)
class _Ran:
    """What became of one workload."""

    workload: Workload
    wired: int | None
    runs: list[Run] = field(default_factory=list)
    swift_bytes: int | None = None
    failure: MemfitError | None = None
