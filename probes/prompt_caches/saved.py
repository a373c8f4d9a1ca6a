"""What was measured of stored caches on this machine, for the plan of conversations."""

from collections.abc import Iterable
from typing import NamedTuple

from memfit.estimators.checkpoint.fingerprint import fingerprint_of
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.offload import MeasuredStorage
from memfit.estimators.runtimes.measurement import MeasuredCache, MeasuredRestore, Measurement, Way
from memfit.estimators.sizing.measurement_lookup import is_of
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.measurement_lookup import contradiction, installed_versions
from memfit.probes.store import Store

_SECOND = 10**9


class Saved(NamedTuple):
    """What is used of the store."""

    storage: MeasuredStorage | None
    warnings: tuple[Note, ...]
    """About measurements that cannot be used."""


def saved_storage(
    sized: SizedModel,
    device: Device | None,
    store: Store,
    *,
    tokens: int,
    bits: int,
    group_size: int | None,
) -> Saved:
    """Return what was measured of a checkpoint on a device, of the length nearest to ``tokens``.

    Files with ``bits`` go before others, then the newest. ``group_size`` is None for 16 bits.
    """
    checkpoint = sized.checkpoint
    if device is None or not checkpoint.header_sha256:
        return Saved(None, ())
    there = store.of(fingerprint_of(checkpoint))
    texts, found = list(there.warnings), []
    for each in there.measurements:
        if not each.caches or not is_of(each, device, installed_versions()):
            continue
        if fault := contradiction(each, sized):
            texts.append(fault)
        else:
            found += [(_stored_tokens(each), cache, each) for cache in each.caches]
    warnings = tuple(Note("warning", "measurement", text) for text in texts)
    if not found:
        return Saved(None, warnings)
    length, cache, measurement = min(
        reversed(found), key=lambda one: (one[1].bits != bits, abs(one[0] - tokens), -one[1].bits)
    )
    same = (length, cache.bits, cache.group_size) == (tokens, bits, group_size)
    restores = cache.restores if same else ()
    return Saved(_measured(length, cache, measurement, restores=restores), warnings)


def _measured(
    tokens: int,
    cache: MeasuredCache,
    measurement: Measurement,
    *,
    restores: Iterable[MeasuredRestore],
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
        prefill_tokens_per_second=max(1, (tokens + 1) * _SECOND // max(1, run.first_token_ns)),
        from_disk=all(each.from_disk for each in cache.restores),
        bulk_bytes=peaks.get("bulk", exact),
        streaming_bytes=peaks.get("freeing", exact),
    )


def _stored_tokens(measurement: Measurement) -> int:
    # The last token of the prompt is the first after the stored ones.
    return measurement.workload.prompt_tokens - 1


def rate(amount: int, nanoseconds: int | None) -> int | None:
    """Return bytes or tokens in a second; at least one, as a speed has to be."""
    return max(1, amount * _SECOND // nanoseconds) if nanoseconds else None
