"""Use measurements of this machine for estimates, where they are valid."""

from importlib.metadata import PackageNotFoundError, version

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.fingerprint import fingerprint_of
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.measurement_lookup import Versions, recall
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.store import Store


def with_measurement(
    sized: SizedModel, workload: Workload, host: Device, store: Store
) -> SizedModel:
    """Return the sized model with this machine's valid measurement of its checkpoint, if any.

    Measurements exist only for mlx-lm and checkpoints with headers.
    """
    checkpoint = sized.checkpoint
    if not sized.runtime_model.is_mlx_lm or not checkpoint.header_sha256:
        return sized
    stored = store.of(fingerprint_of(checkpoint))
    warnings = tuple(Note("warning", "measurement", warning) for warning in stored.warnings)
    measurements = []
    for each in stored.measurements:
        if fault := contradiction(each, sized):
            warnings += (Note("warning", "measurement", fault),)
        else:
            measurements.append(each)
    if not measurements:
        return replace(sized, notes=warnings)
    found = recall(
        measurements,
        device=host,
        versions=installed_versions(),
        workload=workload,
        model=checkpoint.id,
    )
    sized = replace(sized, notes=(*warnings, *found.notes))
    return sized.measured(found.measurement) if found.measurement else sized


def contradiction(measurement: Measurement, sized: SizedModel) -> str | None:
    """Return why a measurement cannot be of a checkpoint with exact headers, None if it can."""
    footprint, measured = sized.footprint, measurement.loaded.weights_bytes
    if footprint.basis != "exact" or measurement.experts is not None:
        return None
    if measured == footprint.loaded_bytes:
        return None
    return (
        f"the measurement {measurement.id} is damaged and not used: its weights have {measured}"
        f" bytes, the files have {footprint.loaded_bytes}; memfit measurements remove"
        f" {measurement.id} removes it"
    )


def installed_versions() -> Versions:
    """Return the installed versions of what runs a model."""
    return Versions(_version("mlx"), _version("mlx-lm"))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
