"""GGUF files on the Hub: headers by ranges, the answer for the file, and no byte of a tensor."""

from pathlib import Path

import pytest

from memfit.estimators.base.errors import CheckpointError, UnreachableError
from memfit.estimators.checkpoint.hub.settings import Hub
from memfit.estimators.checkpoint.hub.source import open_hub_file
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.opening import open_checkpoint
from tests.gguf.test_files import LLAMA, WEIGHTS, write_series
from tests.gguf.writing import write
from tests.hub.conftest import NAME, Reader
from tests.hub.server import COMMIT, FakeHub, Fault, Repo

FILE = f"{NAME}:model-Q4_0.gguf"
TOKENS = {"tokenizer.ggml.tokens": [f"token {i}" for i in range(100_000)]}


@pytest.fixture
def folder(tmp_path: Path, hub: FakeHub) -> Path:
    """A repository of GGUF files: one, and a series in a folder."""
    folder = tmp_path / "gguf"
    (folder / "big").mkdir(parents=True)
    write(folder / "model-Q4_0.gguf", {**LLAMA, **TOKENS}, WEIGHTS)
    write_series(folder / "big")
    hub.repos[NAME] = Repo(folder)
    return folder


def opened(read: Reader, reference: str = FILE, *, offline: bool = False) -> Checkpoint:
    settings = Hub(read.hub.endpoint, read.snapshots, offline, 5.0)
    return open_hub_file(reference, progress=read.reports, hub=settings, cache=read.cache)


def test_a_file_on_the_hub_is_read_as_a_local_one(read: Reader, folder: Path, hub: FakeHub) -> None:
    checkpoint = opened(read)
    here = open_checkpoint(str(folder / "model-Q4_0.gguf"))
    assert checkpoint.tensors == here.tensors
    assert checkpoint.config == here.config
    assert checkpoint.header_sha256 == here.header_sha256
    assert (checkpoint.id, checkpoint.source, checkpoint.revision) == (FILE, "gguf", COMMIT)
    assert checkpoint.config_name == f"{NAME}/model-Q4_0.gguf"
    ranged = [made for made in hub.made if made.headers.get("range")]
    assert 1 <= len(ranged) <= 8
    assert sum(made.sent for made in ranged) <= 2 * here.header_bytes + 2**17


def test_a_series_on_the_hub_is_read_completely(read: Reader, folder: Path) -> None:
    checkpoint = opened(read, f"{NAME}@main:big/big-00002-of-00003.gguf")
    assert (checkpoint.shards, checkpoint.tensors) == (3, WEIGHTS)


def test_a_second_read_makes_one_request_and_an_offline_read_none(
    read: Reader, folder: Path, hub: FakeHub
) -> None:
    first = opened(read)
    hub.made.clear()
    assert opened(read) == first
    assert len(hub.made) == 1
    hub.made.clear()
    again = opened(read, offline=True)
    assert hub.made == []
    assert again.tensors == first.tensors
    assert "HF_HUB_OFFLINE is set" in again.warnings[0]


def test_a_missing_file_is_reported_with_the_existing_ones(read: Reader, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no other\.gguf; it has big/big-00001"):
        opened(read, f"{NAME}:other.gguf")


def test_a_downloaded_gguf_snapshot_is_read_without_a_request(
    read: Reader, folder: Path, hub: FakeHub
) -> None:
    snapshot = read.snapshots / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model-Q4_0.gguf").symlink_to(folder / "model-Q4_0.gguf")
    checkpoint = opened(read, f"{NAME}@{COMMIT}:model-Q4_0.gguf")
    assert (checkpoint.tensors, checkpoint.revision) == (WEIGHTS, COMMIT)
    assert hub.made == []


@pytest.mark.parametrize("kind", ["reset", "short"])
def test_network_faults_give_a_one_line_error(
    read: Reader, folder: Path, hub: FakeHub, kind: str
) -> None:
    hub.faults = [Fault("model-Q4_0", kind)]
    with pytest.raises((UnreachableError, CheckpointError)) as caught:
        opened(read)
    assert "\n" not in str(caught.value)
