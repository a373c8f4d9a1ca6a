"""Use measurements of this machine for estimates, where they are valid."""

from importlib.metadata import PackageNotFoundError, version

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.fingerprint import fingerprint_of
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Note
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
    if not stored.measurements:
        return replace(sized, notes=warnings)
    found = recall(
        stored.measurements,
        device=host,
        versions=Versions(_version("mlx"), _version("mlx-lm")),
        workload=workload,
        model=checkpoint.id,
    )
    sized = replace(sized, notes=(*warnings, *found.notes))
    return sized.measured(found.measurement) if found.measurement else sized


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
