"""A model reference is a path if that exists, a Hub name if it looks like one."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import CheckpointError, MemfitError
from memfit.estimators.checkpoint.opening import open_checkpoint
from tests.gguf.writing import tensor, write
from tests.sparse import write_safetensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", (4,))})
    return tmp_path


def test_directories_and_files_are_local_and_have_tensors(model: Path) -> None:
    for path in (model, model / "model.safetensors"):
        checkpoint = open_checkpoint(str(path))
        assert (checkpoint.id, checkpoint.source) == (str(path), "local")
        assert checkpoint.tensors == (("a", "BF16", (4,), 8),)


def test_a_json_file_is_only_a_config_even_with_weights_in_its_folder(model: Path) -> None:
    path = model / "config.json"
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.id, checkpoint.source, checkpoint.tensors) == (str(path), "config", None)
    assert checkpoint.config == {"model_type": "llama"}
    renamed = path.rename(model / "llama-8b.JSON")
    assert open_checkpoint(str(renamed)).config_name == str(renamed)


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_a_yaml_file_is_a_sample_with_its_own_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"sample.{suffix}"
    path.write_text("schema: memfit.sample/1\nname: tiny\nsource: none\nconfig: {vocab_size: 8}\n")
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.id, checkpoint.source) == ("tiny", "sample")
    assert checkpoint.config == {"vocab_size": 8}
    assert checkpoint.config_name == str(path)


def test_an_existing_path_is_preferred_to_a_hub_name(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "org" / "name").mkdir(parents=True)
    (model / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(model)
    assert open_checkpoint("org/name").source == "local"


def test_a_tilde_is_the_home_directory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model))
    assert open_checkpoint("~/config.json").id == str(model / "config.json")


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "gone",
        "./gone",
        "/gone",
        "../org/name",
        "~/gone",
        "~nobody-by-this-name/x",
        "a/b/c",
        "a\\b",
        "org/model.safetensors",
        "org/model.GGUF",
        "gone.json",
        "org/na me",
        "org/",
        "org/nämé",
        "org/name@",
        "a\0b",
        "x" * 5000,
        "org/name\n",
    ],
)
def test_a_missing_path_is_not_looked_up_on_the_hub(reference: str) -> None:
    with pytest.raises(CheckpointError, match="no such path; give a model's directory") as caught:
        open_checkpoint(reference)
    assert len(str(caught.value).splitlines()) == 1


def test_a_gguf_suffix_may_be_in_any_case(tmp_path: Path) -> None:
    weights = (tensor("token_embd.weight", (32, 8)),)
    path = write(tmp_path / "model.GGUF", {"general.architecture": "llama"}, weights)
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.source, checkpoint.tensors) == ("gguf", weights)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("model.safetensors.index.json", "an index of shards; give the directory it is in"),
        ("pytorch_model.bin", "not a file that describes a model"),
        ("README.md", "not a file that describes a model"),
    ],
)
def test_a_file_that_is_not_a_model_is_rejected_with_the_accepted_kinds(
    tmp_path: Path, name: str, fault: str
) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=fault):
        open_checkpoint(str(tmp_path / name))


@pytest.mark.parametrize("name", ["config.json", "sample.yaml", "model.safetensors"])
def test_pipes_and_broken_links_are_rejected_without_waiting(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        open_checkpoint(str(path))
    path.unlink()
    path.symlink_to("gone")
    with pytest.raises(CheckpointError, match="is a broken link"):
        open_checkpoint(str(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may go anywhere")
def test_a_path_in_an_unreadable_directory_is_not_reported_as_missing(model: Path) -> None:
    model.chmod(0)
    try:
        with pytest.raises(CheckpointError, match="permission denied for one of its folders"):
            open_checkpoint(str(model / "config.json"))
    finally:
        model.chmod(0o700)


@given(st.text(max_size=20))
def test_an_arbitrary_reference_opens_nothing_and_gives_a_clear_error(reference: str) -> None:
    with pytest.raises(MemfitError) as caught:
        open_checkpoint(f"no-such-thing-{reference}")
    assert len(str(caught.value).splitlines()) == 1
