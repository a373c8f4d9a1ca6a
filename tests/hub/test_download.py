"""Downloading a model: existing files are used, missing ones are requested."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, MachineError, UnreachableError
from memfit.estimators.checkpoint.hub.settings import Hub
from memfit.probes.download import NotDownloadedError, local_snapshot
from tests.hub.conftest import NAME, Reports
from tests.hub.server import FakeHub, Fault
from tests.models import QWEN3_4B, write_checkpoint
from tests.sparse import Shapes

TENSORS: Shapes = {f"model.layers.{n}.mlp.up_proj.weight": ("BF16", (512, 512)) for n in range(6)}
UNWANTED = ("modeling_custom.py", "README.md", "pytorch_model.bin", "original.safetensors")
WANTED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt")
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A typical repository: a model in shards, a tokenizer, code and more."""
    folder = write_checkpoint(tmp_path / "model", QWEN3_4B, TENSORS, shards=3)
    for name in (*UNWANTED, *WANTED):
        (folder / name).write_text(f"this is {name}")
    return folder


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Hub(hub.endpoint, tmp_path / "hf" / "hub", timeout_seconds=5.0)


def wanted_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.iterdir() if path.name not in UNWANTED)


def test_the_files_mlx_lm_loads_are_downloaded_but_no_code(
    hub: FakeHub, settings: Hub, model: Path
) -> None:
    reports = Reports()
    path = local_snapshot(NAME, download=True, progress=reports, hub=settings)
    names = {file.name for file in path.iterdir()}
    assert names == {file.name for file in model.iterdir()} - set(UNWANTED)
    for name in names:
        assert (path / name).read_bytes() == (model / name).read_bytes()
    assert not [asked for asked in hub.asked() if asked.endswith(UNWANTED)]


def test_progress_counts_every_byte(hub: FakeHub, settings: Hub, model: Path) -> None:
    reports = Reports()
    local_snapshot(NAME, download=True, progress=reports, hub=settings)
    assert reports.begun[-1] == (f"Downloading {NAME}", wanted_bytes(model))
    assert reports.advanced >= wanted_bytes(model)
    assert reports.ended == len(reports.begun)


def test_a_complete_model_in_the_cache_is_used_without_a_request(
    hub: FakeHub, settings: Hub
) -> None:
    path = local_snapshot(NAME, download=True, hub=settings)
    hub.made.clear()
    for download in (False, True):
        assert local_snapshot(NAME, download=download, hub=settings) == path
        assert local_snapshot(f"{NAME}@main", download=download, hub=settings) == path
        commit = hub.repos[NAME].commit
        assert local_snapshot(f"{NAME}@{commit}", download=download, hub=settings) == path
    assert hub.made == []


def test_nothing_is_downloaded_without_the_option(
    hub: FakeHub, settings: Hub, tmp_path: Path
) -> None:
    with pytest.raises(
        NotDownloadedError, match=f"{NAME}: is not complete in Hugging Face's cache"
    ):
        local_snapshot(NAME, download=False, hub=settings)
    assert hub.made == []
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "tokenizer.json"])
def test_a_partial_download_is_completed_without_fetching_a_file_twice(
    hub: FakeHub, settings: Hub, model: Path, name: str
) -> None:
    path = local_snapshot(NAME, download=True, hub=settings)
    (path / name).resolve().unlink()
    (path / name).unlink()
    with pytest.raises(NotDownloadedError):
        local_snapshot(NAME, download=False, hub=settings)
    hub.made.clear()
    reports = Reports()
    assert local_snapshot(NAME, download=True, progress=reports, hub=settings) == path
    assert reports.begun[-1][1] == (model / name).stat().st_size
    fetched = {made.path.partition("?")[0].rpartition("/")[2] for made in hub.made if made.sent}
    assert {file for file in fetched if (model / file).is_file()} == {name}


def test_a_disk_without_room_is_reported_before_the_download(
    hub: FakeHub, settings: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = wanted_bytes(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(nbytes, 1, nbytes - 1))
    with pytest.raises(MachineError, match=r"the download takes 3\.\d MB, .* has 3\.\d MB free"):
        local_snapshot(NAME, download=True, hub=settings)
    assert [made.path for made in hub.made if "resolve" in made.path] == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(nbytes, 0, nbytes))
    assert local_snapshot(NAME, download=True, hub=settings).is_dir()


def test_without_a_network_nothing_is_downloaded(settings: Hub, hub: FakeHub) -> None:
    offline = replace(settings, offline=True)
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
        local_snapshot(NAME, download=True, hub=offline)
    path = local_snapshot(NAME, download=True, hub=settings)
    assert local_snapshot(NAME, download=True, hub=offline) == path


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("org/none", UnreachableError, "no such repository"),
        (f"{NAME}@other", CheckpointError, "has no such revision"),
        ("org/a..b", CheckpointError, "not a Hub name"),
        ("org/name/more", CheckpointError, "not a Hub name"),
    ],
)
def test_a_missing_repository_gives_a_one_line_error(
    hub: FakeHub, settings: Hub, name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        local_snapshot(name, download=True, hub=settings)
    assert "\n" not in str(raised.value)


def test_a_gated_model_gives_the_next_step(hub: FakeHub, settings: Hub) -> None:
    hub.repos[NAME].gated = True
    with pytest.raises(UnreachableError, match=f"{NAME}: is gated; accept its terms"):
        local_snapshot(NAME, download=True, hub=settings)


def test_an_interrupted_download_gives_a_one_line_error_and_can_be_resumed(
    hub: FakeHub, settings: Hub
) -> None:
    hub.faults.append(Fault("model-00003", "status", status=403, headers={"X-Error-Code": "x"}))
    with pytest.raises(UnreachableError) as raised:
        local_snapshot(NAME, download=True, hub=settings)
    assert "\n" not in str(raised.value)
    hub.faults.clear()
    assert local_snapshot(NAME, download=True, hub=settings).is_dir()
