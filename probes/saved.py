"""What the experiments on this machine saved of a checkpoint, for its plans."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.files import is_there
from memfit.estimators.checkpoint.manifest import Checkpoint, fingerprint_of
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.experts import MeasuredCapacity
from memfit.estimators.results.offload import MeasuredStorage
from memfit.estimators.results.train import MeasuredPhases, TrainPlan
from memfit.estimators.runtimes.measurement import (
    MeasuredCache,
    MeasuredRestore,
    MeasuredTraining,
    Measurement,
    Way,
)
from memfit.estimators.sizing.measurement_lookup import is_of
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.measurement_lookup import contradiction, installed_versions
from memfit.probes.speed import median_speed, rate
from memfit.probes.store import Store


def saved_profile(checkpoint: Checkpoint, store: Store) -> Path | None:
    """Return the file of the checkpoint's last routing profile, None without one."""
    if not checkpoint.header_sha256:
        return None
    path = store.profile_path(fingerprint_of(checkpoint))
    return path if is_there(path) else None


def saved_capacities(
    checkpoint: Checkpoint, device: Device | None, store: Store
) -> tuple[MeasuredCapacity, ...]:
    """Return the valid measurements of a checkpoint by capacity; of each kind the newest."""
    newest = {}
    for each in _valid(checkpoint, device, store):
        if each.experts:
            capacity = _capacity(each)
            newest[capacity.capacity, capacity.policy] = capacity
    return tuple(newest[key] for key in sorted(newest))


def saved_phases(
    plan: TrainPlan, checkpoint: Checkpoint, device: Device | None, store: Store
) -> MeasuredPhases | None:
    """Return the newest valid measurement of a plan's recipe, None without one."""
    newest = None
    for each in () if plan.weight_bits else _valid(checkpoint, device, store):
        training = each.training
        if training and _has_recipe_of(training, plan):
            newest = MeasuredPhases(
                measurement_id=each.id,
                validation_bytes=training.validation_bytes,
                first_step_bytes=training.first_step_bytes,
                later_steps_bytes=training.later_steps_bytes,
            )
    return newest


class SavedStorage(NamedTuple):
    """The measurement of stored caches that a plan uses."""

    storage: MeasuredStorage | None
    warnings: tuple[Note, ...]
    """Notes about measurements that cannot be used."""


def saved_storage(
    sized: SizedModel,
    device: Device | None,
    store: Store,
    *,
    tokens: int,
    bits: int,
    group_size: int | None,
) -> SavedStorage:
    """Return what was measured of a checkpoint on a device, of the length nearest to ``tokens``.

    Files with ``bits`` go before others, then the newest. ``group_size`` is None for 16 bits.
    """
    checkpoint = sized.checkpoint
    if device is None or not checkpoint.header_sha256:
        return SavedStorage(None, ())
    texts = list(store.of(fingerprint_of(checkpoint)).warnings)
    usable: list[tuple[int, MeasuredCache, Measurement]] = []
    for each in _valid(checkpoint, device, store):
        if each.caches and (fault := contradiction(each, sized)):
            texts.append(fault)
        else:
            usable += [(_stored_tokens(each), cache, each) for cache in each.caches]
    warnings = tuple(Note("warning", "measurement", text) for text in texts)
    if not usable:
        return SavedStorage(None, warnings)
    length, cache, measurement = min(
        reversed(usable), key=lambda one: (one[1].bits != bits, abs(one[0] - tokens), -one[1].bits)
    )
    is_same = (length, cache.bits, cache.group_size) == (tokens, bits, group_size)
    restores = cache.restores if is_same else ()
    return SavedStorage(_storage(length, cache, measurement, restores), warnings)


def _valid(checkpoint: Checkpoint, device: Device | None, store: Store) -> Iterator[Measurement]:
    """Yield the measurements of a checkpoint on a device with the installed versions."""
    if device is None or not checkpoint.header_sha256:
        return
    for each in store.of(fingerprint_of(checkpoint)).measurements:
        if is_of(each, device, installed_versions()):
            yield each


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


def _storage(
    tokens: int,
    cache: MeasuredCache,
    measurement: Measurement,
    restores: tuple[MeasuredRestore, ...],
) -> MeasuredStorage:
    # The only way that reads and computes nothing; some classes cannot use a quantised cache so.
    reads = (
        rate(file.file_bytes, each.restore_ns)
        for file in (cache, *measurement.caches)
        for each in file.restores
        if each.way == "as-stored"
    )
    peaks: dict[Way, int] = {each.way: each.peak_bytes for each in restores}
    # Without a quantised layer there is nothing to dequantise.
    exact = None if cache.group_size else peaks.get("as-stored")
    [run] = measurement.runs
    return MeasuredStorage(
        measurement_id=measurement.id,
        tokens=tokens,
        bits=cache.bits,
        read_bytes_per_second=next(reads, None),
        write_bytes_per_second=rate(cache.file_bytes, cache.write_ns),
        prefill_tokens_per_second=rate(tokens + 1, max(1, run.first_token_ns)) or 1,
        from_disk=all(each.from_disk for each in cache.restores),
        bulk_bytes=peaks.get("bulk", exact),
        streaming_bytes=peaks.get("freeing", exact),
    )


def _stored_tokens(measurement: Measurement) -> int:
    # The last token of the prompt is the first after the stored ones.
    return measurement.workload.prompt_tokens - 1


def _has_recipe_of(training: MeasuredTraining, plan: TrainPlan) -> bool:
    recipe = training.recipe
    if recipe.num_layers < 1:
        recipe = replace(recipe, num_layers=plan.layers)
    # The loss takes as much memory with a mask.
    planned = replace(plan.recipe, max_seq_length=plan.sequence_tokens, mask_prompt=False)
    return replace(recipe, mask_prompt=False) == planned
