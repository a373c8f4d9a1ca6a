"""``memfit tune org/name``: measured when it is downloaded, fetched on request."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.estimators.base.units import format_bytes
from tests.checkpoints import Checkpoints
from tests.hub.conftest import NAME
from tests.hub.server import FakeHub, Repo, serve
from tests.hub.test_command import Shell

ASK = ("--prompt-tokens", "40", "--max-tokens", "2", "--json")


@pytest.fixture
def hub(checkpoints: Checkpoints) -> Iterator[FakeHub]:
    """A Hub with a model that runs."""
    with serve(FakeHub({NAME: Repo(checkpoints("dense-4bit"))})) as served:
        yield served


@pytest.mark.exhaustive
def test_a_downloaded_model_can_be_tuned(hub: FakeHub, tmp_path: Path) -> None:
    shell = Shell(hub, tmp_path)
    shell.environment["MEMFIT_HOME"] = str(tmp_path / "home")
    refused = shell("tune", NAME, *ASK)
    assert (refused.returncode, json.loads(refused.stdout)["exit_code"]) == (2, 2)
    assert refused.stderr.startswith(f"memfit: {NAME}: is not complete in Hugging Face's cache (")
    weights = (hub.repos[NAME].folder / "model.safetensors").stat().st_size
    assert refused.stderr.endswith(f"; --download fetches its {format_bytes(weights)}\n")
    fetched = shell("tune", NAME, *ASK, "--download")
    assert fetched.returncode == 0, fetched.stderr
    data = json.loads(fetched.stdout)
    assert (data["model"]["id"], data["points"][0]["status"]) == (NAME, "measured")
    hub.made.clear()
    again = shell("tune", NAME, *ASK, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert hub.made == []
    assert (
        json.loads(again.stdout)["points"][0]["measurement_id"]
        == (data["points"][0]["measurement_id"])
    )


def test_a_model_that_does_not_fit_is_rejected_before_the_download(
    hub: FakeHub, tmp_path: Path
) -> None:
    shell = Shell(hub, tmp_path)
    refused = shell("tune", NAME, *ASK, "--download", "--margin", "1000TB")
    assert (refused.returncode, json.loads(refused.stdout)["exit_code"]) == (5, 5)
    assert "--force runs it anyway" in refused.stderr
    assert hub.sent() < (hub.repos[NAME].folder / "model.safetensors").stat().st_size // 2
