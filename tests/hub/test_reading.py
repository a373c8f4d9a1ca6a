"""A model on the Hub is read like its directory, with a limited number of requests and bytes."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, UnreachableError, UnsupportedError
from memfit.estimators.base.progress import NULL_PROGRESS
from memfit.estimators.checkpoint.hub.repository import THREADS_NEARBY
from memfit.estimators.checkpoint.hub.requests import Client
from memfit.estimators.checkpoint.hub.settings import Hub
from memfit.estimators.checkpoint.local.directory import read_directory
from memfit.estimators.checkpoint.manifest import Checkpoint
from tests.hub.conftest import NAME, TENSORS, Reader
from tests.hub.server import COMMIT, FakeHub, Repo
from tests.models import QWEN3_4B, plain_tensors, write_checkpoint, write_config
from tests.sparse import Shapes, write_safetensors

INDEX = "model.safetensors.index.json"
SPARE_BYTES = 128_000


def as_local(checkpoint: Checkpoint, directory: Path) -> Checkpoint:
    """The only difference between a model on the Hub and its directory: the location."""
    local = read_directory(directory)
    return replace(
        local,
        source="hub",
        revision=COMMIT,
        id=checkpoint.id,
        config_name=checkpoint.config_name,
        others=None,
    )


def repository(hub: FakeHub, folder: Path) -> FakeHub:
    hub.repos[NAME] = Repo(folder)
    return hub


def test_a_repository_is_read_like_its_directory(read: Reader, model: Path) -> None:
    checkpoint = read()
    assert checkpoint == as_local(checkpoint, model)
    assert (checkpoint.id, checkpoint.config_name) == (NAME, f"{NAME}/config.json")
    assert (checkpoint.shards, len(checkpoint.tensors or ())) == (3, len(plain_tensors(QWEN3_4B)))


def test_a_commit_is_read_like_its_branch(read: Reader) -> None:
    by_branch, by_commit = read(f"{NAME}@main"), read(f"{NAME}@{COMMIT}")
    assert by_commit.tensors == by_branch.tensors
    assert by_commit.id == f"{NAME}@{COMMIT}"
    assert by_commit.revision == by_branch.revision == COMMIT


def test_a_revision_with_a_slash_is_one_part_of_the_path(read: Reader, hub: FakeHub) -> None:
    hub.repos[NAME].branch = "refs/pr/3"
    assert read(f"{NAME}@refs/pr/3").revision == COMMIT
    assert f"/api/models/{NAME}/revision/refs%2Fpr%2F3?blobs=true" in hub.asked()


@pytest.mark.parametrize("shards", [1, 2, 12, 36])
def test_requests_and_bytes_are_bounded(
    read: Reader, hub: FakeHub, tmp_path: Path, shards: int
) -> None:
    folder = write_checkpoint(tmp_path / "many", QWEN3_4B, TENSORS, shards=shards)
    repository(hub, folder)
    checkpoint = read()
    assert len(hub.asked()) <= shards + 4
    assert len(hub.asked("files")) == shards
    weights = [made for made in hub.made if made.host == "files"]
    assert sum(made.sent for made in weights) <= checkpoint.header_bytes + SPARE_BYTES * shards
    assert max(made.sent for made in weights) <= SPARE_BYTES
    # The rest is the config, the index and the listing, once each.
    small = sum((folder / n).stat().st_size for n in ("config.json", INDEX))
    assert hub.sent() - sum(made.sent for made in weights) < small + 50_000
    # A header without an index is read no further.
    assert checkpoint.header_bytes <= sum(r.nbytes for r in read.reports.requests) <= hub.sent()


def test_a_redirect_leaves_its_connection_to_the_next_request(hub: FakeHub, tmp_path: Path) -> None:
    client = Client(Hub(hub.endpoint, tmp_path), NAME, NULL_PROGRESS)
    shard = f"{hub.endpoint}/{NAME}/resolve/main/model-00001-of-00003.safetensors"
    for first in range(0, 3000, 1000):
        client.get(shard, lambda _: 1000, span=(first, first + 1000))
    connections = {made.connection for made in hub.made}
    assert (len(hub.made), len(connections)) == (6, 2)  # one for each host


@pytest.mark.parametrize(("latency", "is_nearby"), [(0.0, True), (0.03, False)])
def test_a_distant_hub_gets_more_connections(
    hub: FakeHub, tmp_path: Path, latency: float, is_nearby: bool
) -> None:
    repository(hub, write_checkpoint(tmp_path / "model", QWEN3_4B, TENSORS, 36))
    hub.latency_seconds = latency
    found = []
    # A busy machine may take a nearby Hub for a distant one.
    for attempt in range(5):
        hub.made.clear()
        Reader(hub, tmp_path / str(attempt))()
        found.append(len({made.connection for made in hub.made if made.host == "hub"}))
        if found[-1] <= THREADS_NEARBY:
            break
    assert (min(found) <= THREADS_NEARBY) is is_nearby


@pytest.mark.parametrize(("tensors", "requests"), [(100, 1), (2500, 2)])
def test_a_long_header_without_an_index_takes_one_more_request(
    read: Reader, hub: FakeHub, tmp_path: Path, tensors: int, requests: int
) -> None:
    folder = write_config(tmp_path / "one", QWEN3_4B)
    shapes: Shapes = {
        f"layers.{n}.self_attn.q_proj.weight": ("BF16", (64,)) for n in range(tensors)
    }
    write_safetensors(folder / "model.safetensors", shapes)
    repository(hub, folder)
    checkpoint = read()
    assert checkpoint == as_local(checkpoint, folder)
    assert len(hub.asked("files")) == requests
    assert len(hub.asked()) <= 1 + 4
    assert sum(m.sent for m in hub.made if m.host == "files") <= (
        max(checkpoint.header_bytes, SPARE_BYTES)
    )


def test_a_header_longer_than_the_index_says_is_read_completely(
    read: Reader, hub: FakeHub, model: Path
) -> None:
    path = model / "model-00002-of-00003.safetensors"
    names = json.loads((model / INDEX).read_text())["weight_map"]
    kept = {
        name: plain_tensors(QWEN3_4B)[name] for name, file in names.items() if file == path.name
    }
    write_safetensors(path, kept, {"note": "x" * 300_000})
    checkpoint = read()
    assert checkpoint == as_local(checkpoint, model)
    assert len(hub.asked("files")) == 4


@pytest.mark.parametrize(
    ("name", "shards", "requests"),
    [
        ("org/name-FP4", 3, 3 + 4),
        ("org/name-nvfp4", 1, 1 + 4),
        ("org/name", 1, 1 + 4),
        # The only case above shards + 4: before the config nothing shows that the file is needed.
        ("org/name", 3, 3 + 5),
    ],
)
def test_modelopts_quantisation_file_is_read_with_the_config(
    read: Reader, hub: FakeHub, tmp_path: Path, name: str, shards: int, requests: int
) -> None:
    model = write_checkpoint(tmp_path / "modelopt", QWEN3_4B, TENSORS, shards=shards)
    if shards == 1:
        (model / INDEX).unlink()
    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    hub.repos[name] = Repo(model)
    checkpoint = read(name)
    assert checkpoint.config["quantization_config"]["quantization"] == {"quant_algo": "FP8"}
    assert len(hub.asked()) == requests


@pytest.mark.parametrize("shards", [1, 3])
def test_a_repository_name_like_modelopts_may_mislead(
    read: Reader, hub: FakeHub, tmp_path: Path, shards: int
) -> None:
    folder = write_checkpoint(tmp_path / "other", QWEN3_4B, TENSORS, shards=shards)
    hub.repos["org/name-FP8"] = Repo(folder)
    checkpoint = read("org/name-FP8")
    assert checkpoint == as_local(checkpoint, folder)
    assert len(hub.asked()) <= shards + 4


def test_pytorch_weights_are_bounded_by_the_listing_alone(
    read: Reader, hub: FakeHub, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "torch", QWEN3_4B)
    with (folder / "pytorch_model.bin").open("wb") as file:
        file.truncate(8_100_000_000)
    repository(hub, folder)
    assert read().weight_bytes_bound == 8_100_000_000
    assert hub.asked("files") == []


def test_files_that_do_not_count_are_listed_with_their_sizes(read: Reader, model: Path) -> None:
    write_safetensors(model / "consolidated.safetensors", {"a": ("BF16", (4,))})
    (model / "original").mkdir()
    write_safetensors(model / "original" / "model.safetensors", {"a": ("BF16", (4,))})
    (left,) = read().skipped_files
    assert left.name == "consolidated.safetensors"
    assert left.nbytes == (model / "consolidated.safetensors").stat().st_size


def test_a_mirror_without_digests_is_read_by_commit(
    read: Reader, hub: FakeHub, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "plain", QWEN3_4B)
    hub.repos[NAME] = Repo(folder, digests=False)
    assert read().config == QWEN3_4B
    hub.made.clear()
    assert read().config == QWEN3_4B
    assert len(hub.asked()) == 1


def test_weights_of_unknown_size_are_rejected(read: Reader, hub: FakeHub) -> None:
    hub.repos[NAME].digests = False
    with pytest.raises(UnreachableError, match="the Hub does not give its size"):
        read()


def test_a_push_between_two_requests_does_not_mix_commits(
    read: Reader, hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    before = {**QWEN3_4B, "num_hidden_layers": 1}
    hub.repos[NAME].before = write_config(tmp_path / "before", before)
    checkpoint = read()
    assert checkpoint == as_local(checkpoint, model)
    assert checkpoint.config["num_hidden_layers"] == 36


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (["a-Q4_K_M.gguf"], "name one of them, org/name:a-Q4_K_M.gguf"),
        (["adapter_config.json", "adapters.safetensors"], "it holds an adapter"),
        (["README.md"], "has no config.json; give a model's repository"),
    ],
)
def test_a_repository_that_is_not_a_model_is_described(
    read: Reader, hub: FakeHub, tmp_path: Path, files: list[str], fault: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    repository(hub, folder)
    with pytest.raises((CheckpointError, UnsupportedError), match=fault):
        read()


@pytest.mark.parametrize("name", ["org/name@../../x", "../name", "org/..", "org/name@a//b"])
def test_an_invalid_hub_name_is_rejected(read: Reader, hub: FakeHub, name: str) -> None:
    with pytest.raises(CheckpointError, match="not a Hub name"):
        read(name)
    assert hub.made == []


def test_progress_reports_every_step_and_ends(read: Reader) -> None:
    read()
    assert read.reports.begun == [("Reading org/name", 4), ("Reading org/name", 3)]
    assert (read.reports.advanced, read.reports.ended) == (7, 2)


def test_requests_are_reported_without_signatures(read: Reader, hub: FakeHub) -> None:
    read()
    assert len(read.reports.requests) == len(hub.made) == 10
    assert not any("signature" in request.url for request in read.reports.requests)
    assert {request.status for request in read.reports.requests} == {200, 206, 302, 404}
