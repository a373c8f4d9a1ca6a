"""What every experiment has: a request, processes, this machine, notes, and what it saves."""

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

from memfit.estimators.base.errors import InputError, MachineError, UnsupportedError
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.units import Units
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint, fingerprint_of
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.host import detect_host
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.runtimes.registry import as_installed, runtime_for_images
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import device_summary
from memfit.estimators.sizing.measurement_lookup import machine_name
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.measurement_json import measurement_id
from memfit.probes.preflight import limited
from memfit.probes.process import ModelProcess

Start = Callable[..., ModelProcess]
"""Makes a process, not started yet; it takes the fields of `RunnerSetup` that a step needs."""


class RunRequest(Struct, frozen=True, kw_only=True):
    """What every experiment needs to know."""

    checkpoint: Checkpoint
    memory_limit_bytes: int | None = None
    """The most memory that MLX may take; the verdict uses it in place of the working set."""
    margin_bytes: int = 0
    force: bool = False
    """Run even when the estimate says that it does not fit."""
    units: Units = Units.GB


Request = TypeVar("Request", bound=RunRequest)


class Experiment(Struct, Generic[Request], kw_only=True):
    """One request while it is answered."""

    request: Request
    start: Start
    save: Callable[[Measurement], None]
    """Called with every complete measurement; raises InputError when it cannot be written."""
    progress: Progress = NULL_PROGRESS
    notes: list[Note] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions, the backend and the device of the processes."""
    machine: Device | None = None
    """This machine within the memory limit; None before the first process has started."""

    @property
    def device(self) -> Device:
        """This machine within the memory limit.

        Raises:
            MachineError: before the first process has started.
        """
        if self.machine is None:
            raise MachineError("nothing was measured")
        return self.machine

    def take_machine(self, versions: Mapping[str, str]) -> Device:
        """Take the versions of a process; return this machine as it sees it, without the limit.

        Raises:
            MachineError: when the memory of the machine could not be read.
        """
        whole, self.versions = measuring_device(versions), versions
        self.machine = limited(whole, self.request.memory_limit_bytes)
        return whole

    def inform(self, code: str, text: str) -> None:
        """Add a note."""
        self.notes.append(Note("info", code, text))

    def warn(self, code: str, text: str) -> None:
        """Add a note of something to look into."""
        self.notes.append(Note("warning", code, text))

    def warn_unsaved(self, what: str, error: InputError) -> None:
        """Add a note of what could not be saved."""
        self.warn("not-kept", f"{what} could not be saved: {error}")

    @property
    def all_notes(self) -> tuple[Note, ...]:
        """The notes, each once."""
        return tuple(dict.fromkeys(self.notes))

    def header(self) -> dict[str, Any]:
        """Return the fields that the results of experiments begin with."""
        checkpoint = self.request.checkpoint
        return {
            "model": checkpoint.id,
            "model_type": str(checkpoint.config.get("model_type", "unknown")),
            "device": device_summary(self.device),
            "mlx_version": self.versions["mlx"],
            "mlx_lm_version": self.versions["mlx_lm"],
        }

    def key_of(self, workload: Workload, **more: Any) -> dict[str, Any]:
        """Return what has to be equal for a measurement of a workload to hold again.

        ``more`` are further fields of `Measurement`.
        """
        return {
            "fingerprint": fingerprint_of(self.request.checkpoint),
            "device": machine_name(self.device),
            "mlx_version": self.versions["mlx"],
            "mlx_lm_version": self.versions["mlx_lm"],
            "mlx_vlm_version": self.versions.get("mlx_vlm"),
            "workload": workload,
            "wired_limit_bytes": None,
            **more,
        }

    def saved_id(self, workload: Workload, **figures: Any) -> str | None:
        """Save a measurement; return its id, None with a note when it cannot be written.

        ``figures`` are the further fields of `Measurement`.
        """
        key = {"swift_workspace_bytes": None, **self.key_of(workload, **figures)}
        measurement = Measurement(
            id=measurement_id(key),
            measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            memfit_version=__version__,
            model=self.request.checkpoint.id,
            backend=self.device.backend,
            **key,
        )
        try:
            self.save(measurement)
        except InputError as error:
            self.warn_unsaved("the measurement", error)
            return None
        return measurement.id


def measuring_device(versions: Mapping[str, str]) -> Device:
    """Return this machine as a process with these versions sees it.

    Raises:
        MachineError: when its memory could not be read.
    """
    device = detect_host(with_gpu=versions["backend"] != "cpu")
    if device is None:
        raise MachineError("this machine's memory could not be read")
    return device


def sized_here(
    checkpoint: Checkpoint, device: Device, workload: Workload, *, margin_bytes: int
) -> SizedModel:
    """Size by trace when a trace supports the workload, else by formula.

    With images it is sized as mlx-vlm runs it.

    Raises:
        UnsupportedError: when neither is possible.
    """
    catalog = Catalog(versioned=as_installed)
    model = catalog.add(checkpoint)
    runtime = runtime_for_images(catalog.native_runtime(model)) if workload.images else None
    sized = partial(catalog.sized, model, device=device, runtime=runtime, margin_bytes=margin_bytes)
    try:
        traced = sized(method="trace")
        if not workload.images:  # whose tokens are not known yet
            traced.figures_for(workload)
    except (MachineError, UnsupportedError):
        return sized()
    return traced
