"""Which measurement of stored caches a plan of conversations takes."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint, fingerprint_of
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.host import detect_host
from memfit.estimators.results.offload import MeasuredStorage, Speeds
from memfit.estimators.runtimes.measurement import MeasuredCache, MeasuredRestore, Measurement, Way
from memfit.estimators.sizing.measurement_lookup import machine_name, recall
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.measurement_json import parse_measurement, to_text
from memfit.probes.measurement_lookup import installed_versions
from memfit.probes.saved import saved_storage
from memfit.probes.store import Store
from tests.checkpoints import Checkpoints
from tests.probes.measurements import RUN, measurement

SAMPLE = Path(__file__).parents[2] / "sample_configs" / "qwen3-8b-4bit.yaml"


def stored(bits: int, restore_ns: int = 10**9) -> MeasuredCache:
    ways: list[Way] = ["as-stored"]
    if bits < 16:
        ways += ["bulk", "freeing"]
    return MeasuredCache(
        bits=bits,
        group_size=64 if bits < 16 else None,
        file_bytes=3000,
        write_ns=2 * 10**9,
        restores=tuple(
            MeasuredRestore(way=way, peak_bytes=1000 * index, restore_ns=restore_ns, from_disk=True)
            for index, way in enumerate(ways, 1)
        ),
    )


@pytest.fixture
def host() -> Device:
    found = detect_host()
    assert found is not None
    return found


@pytest.fixture
def checkpoint() -> Checkpoint:
    return replace(open_checkpoint(str(SAMPLE)), header_sha256="a" * 64)


def sized(checkpoint: Checkpoint) -> SizedModel:
    return size(checkpoint, device=None)


def measured(
    checkpoint: Checkpoint, host: Device, tokens: int, *caches: MeasuredCache
) -> Measurement:
    versions = installed_versions()
    return measurement(
        fingerprint=fingerprint_of(checkpoint),
        device=machine_name(host),
        backend=host.backend,
        mlx_version=versions.mlx or "none",
        mlx_lm_version=versions.mlx_lm or "none",
        workload=Workload(prompt_tokens=tokens + 1, max_tokens=8),
        runs=(replace(RUN, first_token_ns=10**9),),
        caches=caches,
    )


def test_the_nearest_length_with_the_bits_of_the_plan_is_taken(
    tmp_path: Path, checkpoint: Checkpoint, host: Device
) -> None:
    if None in installed_versions():
        pytest.skip("a measurement is of installed versions")
    store = Store(tmp_path)
    store.save(measured(checkpoint, host, 100, stored(16), stored(8)))
    store.save(measured(checkpoint, host, 900, stored(16)))

    def found(tokens: int, bits: int, group_size: int | None = 64) -> MeasuredStorage:
        taken = saved_storage(
            sized(checkpoint), host, store, tokens=tokens, bits=bits, group_size=group_size
        )
        assert taken.storage is not None
        return taken.storage

    same = found(100, 8)
    assert (same.bulk_bytes, same.streaming_bytes) == (2000, 3000)
    assert (same.read_bytes_per_second, same.write_bytes_per_second) == (3000, 1500)
    assert same.prefill_tokens_per_second == 101
    assert found(100, 8, group_size=32).bulk_bytes is None
    assert found(101, 8).bulk_bytes is None
    # The bits of the plan go before its length; without them the file with the most.
    assert (found(900, 8).tokens, found(900, 4).tokens) == (100, 900)
    assert found(900, 4).bits == 16
    assert found(900, 16, None).bulk_bytes == 1000
    assert Speeds(read=7).or_measured(same) == Speeds(7, 1500, 101)


def test_other_machines_and_plain_runs_are_not_taken(
    tmp_path: Path, checkpoint: Checkpoint, host: Device
) -> None:
    store = Store(tmp_path)
    store.save(measured(checkpoint, replace(host, name="another"), 100, stored(8)))
    store.save(measured(checkpoint, host, 100))
    for device in (host, None):
        model = sized(checkpoint)
        found = saved_storage(model, device, store, tokens=100, bits=8, group_size=64)
        assert found == (None, ())


def test_a_measurement_that_contradicts_the_files_is_named_and_not_used(
    tmp_path: Path, checkpoints: Checkpoints, host: Device
) -> None:
    checkpoint = open_checkpoint(str(checkpoints("no-tokenizer")))
    store, model = Store(tmp_path), sized(checkpoint)
    kept = measured(checkpoint, host, 100, stored(8))
    kept = replace(kept, loaded=replace(kept.loaded, weights_bytes=1))
    store.save(kept)
    found = saved_storage(model, host, store, tokens=100, bits=8, group_size=64)
    assert found.storage is None
    [warning] = found.warnings
    assert f"the measurement {kept.id} is damaged and not used" in warning.message


def test_a_stored_cache_is_kept_with_its_bits_and_says_nothing_of_estimates(
    checkpoint: Checkpoint, host: Device
) -> None:
    kept = measured(checkpoint, host, 100, stored(16), stored(8))
    assert parse_measurement(to_text(kept).encode(), Path("kept.json")) == kept
    assert kept.id != measured(checkpoint, host, 100, stored(8)).id
    found = recall(
        [kept], device=host, versions=installed_versions(), workload=kept.workload, model="model"
    )
    assert found.measurement is None
