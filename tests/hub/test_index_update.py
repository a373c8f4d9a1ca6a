"""``memfit index update``: the index made from a Hub, and made on after an interruption."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.errors import UnreachableError
from memfit.estimators.base.progress import NULL_PROGRESS
from memfit.estimators.checkpoint.hub.settings import Hub
from memfit.estimators.checkpoint.index.records import Index, IndexedModel, shipped_index
from memfit.estimators.checkpoint.index.update import Update, publishers, update_index
from tests.hub.server import FakeHub, Fault, Repo, serve
from tests.hub.test_command import Shell
from tests.models import QWEN3_4B, write_config

PARAMETERS = 4_022_468_096
LISTED = {"createdAt": "2025-04-27T03:41:29.000Z", "safetensors": {"total": PARAMETERS}}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub with two models of one owner, one without a config, and a conversion."""
    repos = {}
    for name in ("org/Qwen3-4B", "org/Other-4B", "org/Gated-7B"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if "Gated" not in name:
            write_config(folder, QWEN3_4B)
        repos[name] = Repo(folder, gated="Gated" in name)
    listed: list[dict[str, Any]] = [
        {"id": name, "tags": ["license:apache-2.0"], **LISTED} for name in repos
    ]
    base = ["base_model:Qwen3", "base_model:quantized:org/Qwen3-4B"]
    listed.append({"id": "mlx-community/Qwen3-4B-4bit", "tags": base, "usedStorage": 2_270_000_000})
    with serve(FakeHub(repos, listed=listed)) as served:
        yield served


def updated(hub: FakeHub, home: Path) -> tuple[Update, Index]:
    settings = Hub(hub.endpoint, home / "hf", timeout_seconds=5.0, longest_seconds=20.0)
    path, former = home / "models.jsonl", shipped_index()

    def parameters(model: IndexedModel) -> int:
        return PARAMETERS

    made = update_index(path, former, settings, parameters, ["org"], NULL_PROGRESS)
    return made, Index(path.read_bytes(), str(path))


def test_an_update_reads_configs_totals_licences_and_conversions(
    hub: FakeHub, tmp_path: Path
) -> None:
    made, index = updated(hub, tmp_path)
    assert (made.models, made.refused) == (3, 1)
    model = index.model("org/Qwen3-4B")
    assert model.config == QWEN3_4B
    assert (model.parameters, model.checked, model.license) == (PARAMETERS, "total", "apache-2.0")
    assert (model.released, model.context) == ("2025-04-27", QWEN3_4B["max_position_embeddings"])
    [conversion] = model.quantized
    assert (conversion.name, conversion.bits) == ("mlx-community/Qwen3-4B-4bit", "4bit")
    assert index.model("org/Gated-7B").config is None
    assert hub.endpoint in index.address(model)
    # What the Hub did not list stays.
    assert set(shipped_index().names) < set(index.names)


def test_an_interrupted_update_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("author=mlx-community", "status", 500))
    with pytest.raises(UnreachableError):
        updated(hub, tmp_path)
    read = sum("config.json" in path for path in hub.asked())
    assert read == 3
    part = tmp_path / "models.jsonl.part"
    part.write_bytes(part.read_bytes() + b'{"name":"org/cu')
    hub.faults.clear()
    made, index = updated(hub, tmp_path)
    assert sum("config.json" in path for path in hub.asked()) == read
    assert (made.models, index.model("org/Other-4B").parameters) == (3, PARAMETERS)
    assert not part.exists()


def test_the_command_writes_the_index_that_names_are_then_looked_up_in(
    hub: FakeHub, tmp_path: Path
) -> None:
    shell = Shell(hub, tmp_path)
    ran = shell("index", "update", "org")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("3 models of 1 owners read")
    assert "made 20" in shell("index", "info").stdout
    ran = shell("other-4b", "--memory", "16GB", "--method", "formula")
    assert "org/Other-4B by its published config" in ran.stdout


def test_without_a_hub_the_update_says_so(hub: FakeHub, tmp_path: Path) -> None:
    ran = Shell(hub, tmp_path)("index", "update", "org", HF_HUB_OFFLINE="1")
    assert (ran.returncode, "HF_HUB_OFFLINE is set" in ran.stderr) == (4, True)


def test_the_publishers_are_the_owners_of_the_configs() -> None:
    owners = publishers(shipped_index())
    assert {"Qwen", "google", "mistralai"} <= set(owners)
    assert len(owners) == len(set(owners))
