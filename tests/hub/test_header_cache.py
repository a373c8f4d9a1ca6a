"""Headers that were read once are not fetched again, and are used without the Hub."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memfit.estimators.base.errors import CheckpointError, UnreachableError
from memfit.estimators.checkpoint.hub.header_cache import HeaderCache, Usage
from tests.hub.conftest import NAME, TENSORS, Reader
from tests.hub.server import COMMIT, FakeHub, Fault
from tests.models import QWEN3_4B, write_checkpoint, write_config

OTHER_COMMIT = "f" * 40
UNLIMITED = Path("/dev/zero")


def snapshot(read: Reader, commit: str = COMMIT, branch: str = "main") -> Path:
    """The directory of a snapshot, in huggingface-hub's layout."""
    folder = read.snapshots / "models--org--name"
    (folder / "refs" / branch).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    return folder / "snapshots" / commit


def test_a_second_call_makes_one_request(read: Reader, hub: FakeHub) -> None:
    first = read()
    hub.made.clear()
    assert read() == first
    assert len(hub.made) == 1


def test_a_new_commit_fetches_only_changed_files(read: Reader, hub: FakeHub, model: Path) -> None:
    first = read()
    (model / "config.json").write_text('{"model_type": "other"}')
    hub.repos[NAME].commit = OTHER_COMMIT
    hub.made.clear()
    second = read()
    assert (second.revision, second.tensors) == (OTHER_COMMIT, first.tensors)
    assert second.config == {"model_type": "other"}
    assert len(hub.made) == 2


@pytest.mark.parametrize("way", ["offline", "closed", "down", "silent"])
def test_without_the_hub_cached_headers_are_used_with_a_note(
    read: Reader, hub: FakeHub, way: str
) -> None:
    first = read()
    hub.made.clear()
    if way != "offline":
        kinds = {"closed": "drop", "down": "status", "silent": "stall"}
        hub.faults = [Fault("", kinds[way])]
    second = read(offline=way == "offline", timeout=0.3)
    assert (second.tensors, second.config) == (first.tensors, first.config)
    (warning,) = second.warnings
    assert warning.startswith(f"{NAME}: ")
    assert f"this is commit {COMMIT[:12]}, as it was last read" in warning
    # At most one request: with a cached answer there is no need for three attempts.
    assert len(hub.made) <= 1


def test_denied_access_is_not_answered_from_the_cache(read: Reader, hub: FakeHub) -> None:
    read()
    hub.repos[NAME].private = True
    with pytest.raises(UnreachableError, match="a private one"):
        read()


def test_offline_reports_a_repository_that_was_never_read(read: Reader, hub: FakeHub) -> None:
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set, and neither"):
        read(offline=True)
    assert hub.made == []


def test_offline_reports_a_missing_part(read: Reader, hub: FakeHub) -> None:
    read()
    largest = max(read.cache.directory.iterdir(), key=lambda path: path.stat().st_size)
    largest.unlink()
    with pytest.raises(UnreachableError, match="a part of it is not kept"):
        read(offline=True)


def test_another_endpoint_has_its_own_entries(read: Reader, hub: FakeHub) -> None:
    read()
    hub.made.clear()
    hub.endpoint = hub.endpoint.replace("127.0.0.1", "localhost")
    read()
    assert len(hub.made) > 1


@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_a_damaged_entry_is_fetched_again(read: Reader, hub: FakeHub, damage: bytes | None) -> None:
    first = read()
    for path in read.cache.directory.iterdir():
        entry = path.read_bytes()
        path.write_bytes(entry[:-1] + bytes([entry[-1] ^ 1]) if damage is None else damage)
    assert read() == first


def test_an_unwritable_cache_is_skipped(read: Reader, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    read.cache = HeaderCache(tmp_path / "file" / "cache")
    assert read() == read()
    assert read.cache.usage() == Usage(0, 0)


def test_the_cache_stays_within_its_limit_and_keeps_recent_entries(tmp_path: Path) -> None:
    cache = HeaderCache(tmp_path / "cache", max_bytes=5 * 132)
    for number in range(5):
        cache.put(b"x" * 100, str(number))
    for age, path in enumerate(sorted(cache.directory.iterdir())):
        os.utime(path, (age, age))
    assert cache.get("0") == b"x" * 100
    cache.put(b"y" * 100, "new")
    cache.trim()
    assert cache.usage() == Usage(5, 5 * 132)
    assert cache.get("0")
    assert cache.get("new") == b"y" * 100


def test_clear_removes_every_entry(tmp_path: Path) -> None:
    cache = HeaderCache(tmp_path / "cache")
    assert cache.clear() == Usage(0, 0)
    cache.put(b"abc", "key")
    assert cache.clear() == Usage(1, 35)
    assert cache.get("key") is None


def test_entries_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    cache = HeaderCache(tmp_path / "cache")
    cache.put(b"a private model's header", "key")
    (entry,) = cache.directory.iterdir()
    assert (cache.directory.stat().st_mode & 0o777, entry.stat().st_mode & 0o777) == (0o700, 0o600)


def test_two_processes_may_share_a_cache(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from memfit.estimators.checkpoint.hub.header_cache import HeaderCache
cache = HeaderCache(Path(sys.argv[1]), max_bytes=20_000)
for turn in range(150):
    key = str(turn % 10)
    cache.put(key.encode() * 3_000, key)
    found = cache.get(key)
    assert found in (None, key.encode() * 3_000), key
    cache.trim()
    if turn % 50 == 49:
        cache.clear()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for process in running:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error.decode()


def test_threads_may_share_a_reader(read: Reader) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(read())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert all(checkpoint == found[0] for checkpoint in found)


def test_a_downloaded_snapshot_is_read_without_a_request(read: Reader, hub: FakeHub) -> None:
    folder = write_checkpoint(snapshot(read), QWEN3_4B, TENSORS, shards=3)
    checkpoint = read()
    assert hub.made == []
    assert (checkpoint.id, checkpoint.source, checkpoint.revision) == (NAME, "hub", COMMIT)
    assert checkpoint.config_name == str(folder / "config.json")
    (warning,) = checkpoint.warnings
    assert warning.endswith(f"commit {COMMIT[:12]}; the Hub was not asked")


def test_a_snapshot_of_the_same_commit_needs_no_note(read: Reader, hub: FakeHub) -> None:
    write_checkpoint(snapshot(read), QWEN3_4B, TENSORS, shards=3)
    assert read(f"{NAME}@{COMMIT}").warnings == ()
    assert hub.made == []


def test_a_partial_snapshot_is_not_used_as_the_model(read: Reader, hub: FakeHub) -> None:
    folder = write_checkpoint(snapshot(read), QWEN3_4B, TENSORS, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert read().shards == 3
    assert hub.made
    with pytest.raises(CheckpointError, match="1 are missing: model-00002-of-00003"):
        read(offline=True)


def test_a_snapshot_with_only_the_config_is_used_only_offline(read: Reader, hub: FakeHub) -> None:
    write_config(snapshot(read), QWEN3_4B)
    assert read(offline=True).tensors is None
    assert hub.made == []
    assert read().tensors is not None


def test_a_snapshot_of_another_revision_is_not_used(read: Reader, hub: FakeHub) -> None:
    write_config(snapshot(read, branch="dev"), QWEN3_4B)
    read()
    assert hub.made


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "huge"])
def test_an_entry_that_is_not_a_small_file_is_absent(tmp_path: Path, kind: str) -> None:
    cache = HeaderCache(tmp_path)
    cache.put(b"content", "key")
    (entry,) = tmp_path.iterdir()
    entry.unlink()
    if kind == "pipe":
        os.mkfifo(entry)
    elif kind == "device":
        entry.symlink_to(UNLIMITED)
    elif kind == "directory":
        entry.mkdir()
    else:
        entry.touch()
        os.truncate(entry, 2**40)
    assert cache.get("key") is None
