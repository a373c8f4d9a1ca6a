"""Use measurements of this machine for estimates, where they are valid."""

from importlib.metadata import PackageNotFoundError, version

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import fingerprint_of
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.facets import Images, MlxLmPrograms, loaded_weights
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.measurement_lookup import Versions, recall
from memfit.estimators.sizing.sized_model import SizedModel, as_measured
from memfit.probes.store import Store


def with_measurement(
    sized: SizedModel, workload: Workload, host: Device, store: Store
) -> SizedModel:
    """Return the sized model with this machine's valid measurement of its checkpoint, if any.

    Measurements exist only for mlx-lm, for images under mlx-vlm, and for checkpoints with headers.
    """
    checkpoint, runtime_model = sized.checkpoint, sized.runtime_model
    is_measured = runtime_model.facet(Images if workload.images else MlxLmPrograms)
    if not is_measured or not checkpoint.header_sha256:
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
        versions=installed_versions(with_images=bool(workload.images)),
        workload=workload,
        model=checkpoint.id,
    )
    sized = replace(sized, notes=(*warnings, *found.notes))
    return as_measured(sized, found.measurement) if found.measurement else sized


def contradiction(measurement: Measurement, sized: SizedModel) -> str | None:
    """Return why a measurement cannot be of a checkpoint with exact headers, None if it can."""
    measured, loaded = (
        measurement.loaded.weights_bytes,
        loaded_weights(sized.runtime_model).loaded_bytes,
    )
    is_of_mlx_lm = sized.runtime_model.facet(MlxLmPrograms) is not None
    is_other = (measurement.mlx_vlm_version is None) != is_of_mlx_lm
    if sized.footprint.basis != "exact" or measurement.experts is not None or is_other:
        return None
    if measured != loaded:
        wrong = f"its weights have {measured} bytes, the files have {loaded}"
    elif _lacks_cache(measurement) and sized.figures_for(Workload(prompt_tokens=1)).kv.nbytes:
        wrong = "its KV cache has 0 bytes, which no run of this model has"
    else:
        return None
    return (
        f"the measurement {measurement.id} is damaged and not used: {wrong}; memfit measurements"
        f" remove {measurement.id} removes it"
    )


def _lacks_cache(measurement: Measurement) -> bool:
    runs = () if measurement.training else measurement.all_runs
    return any(not (run.kv_bytes and run.kv_held_bytes) for run in runs)


def installed_versions(*, with_images: bool = False) -> Versions:
    """Return the installed versions of what runs a model."""
    vlm = (_version("mlx-vlm") or "none") if with_images else None
    return Versions(_version("mlx"), _version("mlx-lm"), vlm)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
