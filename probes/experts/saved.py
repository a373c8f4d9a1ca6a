"""What was measured of a mixture of experts on this machine, for its plan."""

from pathlib import Path

from memfit.estimators.base.files import is_there
from memfit.estimators.checkpoint.fingerprint import fingerprint_of
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.results.experts import MeasuredCapacity
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.measurement_lookup import is_of
from memfit.probes.measurement_lookup import installed_versions
from memfit.probes.speed import median_speed
from memfit.probes.store import Store


def saved_profile(checkpoint: Checkpoint, store: Store) -> Path | None:
    """Return the file of the checkpoint's last profile, None without one."""
    if not checkpoint.header_sha256:
        return None
    path = store.profile_path(fingerprint_of(checkpoint))
    return path if is_there(path) else None


def saved_capacities(
    checkpoint: Checkpoint, device: Device | None, store: Store
) -> tuple[MeasuredCapacity, ...]:
    """Return the valid measurements of a checkpoint by capacity; of each kind the newest."""
    if device is None or not checkpoint.header_sha256:
        return ()
    found = {}
    for each in store.of(fingerprint_of(checkpoint)).measurements:
        if each.experts and is_of(each, device, installed_versions()):
            found[each.experts.capacity, each.experts.policy] = _capacity(each)
    return tuple(found[key] for key in sorted(found))


def _capacity(measurement: Measurement) -> MeasuredCapacity:
    assert measurement.experts is not None
    runs, workload = measurement.runs, measurement.workload
    tokens, misses = (
        sum(run.value(f"decode_{name}") or 0 for run in runs) for name in ("tokens", "misses")
    )
    speed = median_speed(workload, runs)
    return MeasuredCapacity(
        capacity=measurement.experts.capacity,
        policy=measurement.experts.policy,
        prompt_tokens=workload.prompt_tokens,
        startup_bytes=measurement.loaded.peak_bytes,
        peak_bytes=max(run.peak_bytes for run in measurement.all_runs),
        decode_tokens_per_second=speed.decode_tokens_per_second if speed else None,
        misses_per_token=round(misses / max(1, tokens), 3),
        measurement_id=measurement.id,
    )
