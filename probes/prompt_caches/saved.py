"""What was measured of stored caches on this machine, for the plan of conversations."""

from collections.abc import Iterable

from memfit.estimators.checkpoint.fingerprint import fingerprint_of
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.results.offload import MeasuredStorage
from memfit.estimators.runtimes.measurement import (
    MeasuredCache,
    MeasuredRestore,
    Measurement,
    Way,
)
from memfit.estimators.sizing.measurement_lookup import is_of
from memfit.probes.measurement_lookup import installed_versions
from memfit.probes.store import Store

_SECOND = 10**9


def saved_storage(
    checkpoint: Checkpoint,
    device: Device | None,
    store: Store,
    *,
    tokens: int,
    bits: int,
    group_size: int | None,
) -> MeasuredStorage | None:
    """Return what was measured of a checkpoint on a device, of the length nearest to ``tokens``.

    Files with ``bits`` go before others, then the newest. ``group_size`` is None for 16 bits.
    """
    if device is None or not checkpoint.header_sha256:
        return None
    found = [
        (_stored_tokens(each), cache, each)
        for each in store.of(fingerprint_of(checkpoint)).measurements
        if is_of(each, device, installed_versions())
        for cache in each.caches
    ]
    if not found:
        return None
    length, cache, measurement = min(
        reversed(found),
        key=lambda one: (one[1].bits != bits, abs(one[0] - tokens), -one[1].bits),
    )
    same = (length, cache.bits, cache.group_size) == (tokens, bits, group_size)
    return _measured(length, cache, measurement, restores=cache.restores if same else ())


def _measured(
    tokens: int,
    cache: MeasuredCache,
    measurement: Measurement,
    *,
    restores: Iterable[MeasuredRestore],
) -> MeasuredStorage:
    # The only way that reads and computes nothing; some classes cannot use a quantised cache so.
    reads = (
        _rate(file.file_bytes, each.restore_ns)
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
        write_bytes_per_second=_rate(cache.file_bytes, cache.write_ns),
        prefill_tokens_per_second=max(1, (tokens + 1) * _SECOND // max(1, run.first_token_ns)),
        from_disk=all(each.from_disk for each in cache.restores),
        bulk_bytes=peaks.get("bulk", exact),
        streaming_bytes=peaks.get("freeing", exact),
    )


def _stored_tokens(measurement: Measurement) -> int:
    # The last token of the prompt is the first after the stored ones.
    return measurement.workload.prompt_tokens - 1


def _rate(nbytes: int, nanoseconds: int | None) -> int | None:
    """Bytes in a second; at least one, as a speed has to be."""
    return None if nanoseconds is None else max(1, nbytes * _SECOND // nanoseconds)
