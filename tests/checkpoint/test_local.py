"""Directories: the set of weights that mlx-lm loads counts; the others are reported."""

import glob
import json
import os
from pathlib import Path

import pytest

from memfit.estimators.base.errors import CheckpointError, ConfigError
from memfit.estimators.checkpoint.local.directory import read_directory, read_file
from memfit.estimators.checkpoint.manifest import Checkpoint
from tests.sparse import Shapes, write_safetensors

A: Shapes = {"a": ("BF16", (4,))}
B: Shapes = {"b": ("BF16", (8,))}
C: Shapes = {"c": ("BF16", (16,))}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def write_all(directory: Path, files: dict[str, Shapes]) -> None:
    for name, tensors in files.items():
        write_safetensors(directory / name, tensors)


def write_index(directory: Path, weight_map: object, name: str = INDEX) -> None:
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sizes(checkpoint: Checkpoint) -> dict[str, int]:
    return {tensor.name: tensor.nbytes for tensor in checkpoint.tensors or ()}


def skipped_files(checkpoint: Checkpoint) -> dict[str, str]:
    return {file.name: file.reason for file in checkpoint.skipped_files}


def error_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_directory(directory)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{directory}")


def test_a_directory_of_shards_is_their_sum(model: Path) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    write_all(model, dict(zip(names, (A, B, C), strict=True)))
    write_index(model, dict(zip("abc", names, strict=True)))
    checkpoint = read_directory(model)
    assert sizes(checkpoint) == {"a": 8, "b": 16, "c": 32}
    assert checkpoint.file_bytes == sum((model / name).stat().st_size for name in names)
    assert checkpoint.file_bytes - checkpoint.header_bytes == 56
    assert (checkpoint.shards, checkpoint.skipped_files, checkpoint.warnings) == (3, (), ())
    assert (checkpoint.id, checkpoint.source) == (str(model), "local")
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.config_name == str(model / "config.json")


def test_shards_count_without_an_index_as_in_mlx_lm(model: Path) -> None:
    write_all(model, {f"model-0000{n}-of-00002.safetensors": s for n, s in ((1, A), (2, B))})
    assert sizes(read_directory(model)) == {"a": 8, "b": 16}


def test_files_matching_mlx_lms_pattern_without_shared_tensors_all_count(model: Path) -> None:
    write_all(model, {"model.safetensors": A, "model_vision.safetensors": B})
    checkpoint = read_directory(model)
    assert len(glob.glob(str(model / "model*.safetensors"))) == checkpoint.shards == 2
    assert sizes(checkpoint) == {"a": 8, "b": 16}
    assert checkpoint.warnings == ()


def test_other_layouts_adapters_and_training_states_are_skipped(model: Path) -> None:
    others = (
        "consolidated.safetensors",
        "adapters.safetensors",
        "0000100_adapters.safetensors",
        "optimizer.safetensors",
        "pytorch_model.bin",
        "training_args.bin",
        "model-Q4_K_M.gguf",
    )
    write_all(model, {"model.safetensors": A, **dict.fromkeys(others, C)})
    (model / "tokenizer.json").write_text("{}")
    (model / "._model.safetensors").write_bytes(b"AppleDouble")
    checkpoint = read_directory(model)
    assert sizes(checkpoint) == {"a": 8}
    assert skipped_files(checkpoint) == {
        "consolidated.safetensors": "mlx-lm loads only model*.safetensors",
        "adapters.safetensors": "an adapter, counted on request",
        "0000100_adapters.safetensors": "an adapter, counted on request",
        "optimizer.safetensors": "state of a training run, not weights",
        "pytorch_model.bin": "a PyTorch file; mlx-lm loads only model*.safetensors",
        "training_args.bin": "state of a training run, not weights",
        "model-Q4_K_M.gguf": "a GGUF file; name it to size it for llama.cpp",
    }
    assert (
        checkpoint.skipped_files[0].nbytes
        == (model / checkpoint.skipped_files[0].name).stat().st_size
    )
    assert checkpoint.warnings == ()


def test_a_single_file_and_its_shards_count_once(model: Path) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": s for n, s in ((1, A), (2, B))}
    write_all(model, {"model.safetensors": {**A, **B}, **shards})
    checkpoint = read_directory(model)
    assert sizes(checkpoint) == {"a": 8, "b": 16}
    assert set(skipped_files(checkpoint)) == set(shards)
    assert checkpoint.shards == 1
    assert "hold tensors that other files hold too" in checkpoint.warnings[0]
    assert "bytes more" not in checkpoint.warnings[0]


def test_the_index_decides_which_of_two_sets_counts(model: Path) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": s for n, s in ((1, A), (2, B))}
    write_all(model, {"model.safetensors": {**A, **B}, **shards})
    write_index(model, dict(zip("ab", shards, strict=True)))
    checkpoint = read_directory(model)
    assert checkpoint.shards == 2
    assert set(skipped_files(checkpoint)) == {"model.safetensors"}


def test_a_second_precision_is_skipped_with_its_size(model: Path) -> None:
    write_all(model, {"model.safetensors": A, "model.fp32.safetensors": {"a": ("F32", (4,))}})
    checkpoint = read_directory(model)
    assert sizes(checkpoint) == {"a": 8}
    assert skipped_files(checkpoint) == {
        "model.fp32.safetensors": "repeats tensors of the files that are counted"
    }
    assert checkpoint.warnings[0].endswith("the other may take 8 bytes more")


def test_a_file_with_some_repeated_tensors_adds_only_the_others(model: Path) -> None:
    write_all(model, {"model.safetensors": A, "model_more.safetensors": {**A, **B}})
    checkpoint = read_directory(model)
    assert sizes(checkpoint) == {"a": 8, "b": 16}
    assert checkpoint.shards == 2
    assert "model_more.safetensors hold tensors" in checkpoint.warnings[0]


def test_weights_that_mlx_lm_would_not_find_count_with_a_warning(model: Path) -> None:
    write_all(model, {"weights.00.safetensors": A, "weights.01.safetensors": B})
    checkpoint = read_directory(model)
    assert sizes(checkpoint) == {"a": 8, "b": 16}
    assert checkpoint.warnings == (
        f"{model}: mlx-lm loads only model*.safetensors; counted weights.00.safetensors, "
        "weights.01.safetensors in their place",
    )


def test_the_index_selects_among_weights_mlx_lm_would_not_find(model: Path) -> None:
    (model / "parts").mkdir()
    write_all(model, {"parts/one.safetensors": A, "consolidated.safetensors": C})
    write_index(model, {"a": "parts/one.safetensors"})
    checkpoint = read_directory(model)
    assert sizes(checkpoint) == {"a": 8}
    assert set(skipped_files(checkpoint)) == {"consolidated.safetensors"}


def test_an_index_that_differs_from_mlx_lms_files_is_reported(model: Path) -> None:
    write_all(model, {"model.safetensors": A, "extra.safetensors": B})
    write_index(model, {"a": "model.safetensors", "b": "extra.safetensors"})
    assert read_directory(model).warnings == (
        f"{model}: {INDEX} names extra.safetensors, but mlx-lm loads only model*.safetensors",
        f"{model}: {INDEX} names tensors that no counted file holds: b",
    )


def test_missing_shards_are_reported_with_and_without_an_index(model: Path) -> None:
    names = [f"model-{number:05d}-of-000009.safetensors" for number in range(1, 10)]
    write_all(model, {names[0]: A, names[8]: B})
    assert error_of(model) == (
        f": of 9 shards, 7 are missing: {', '.join(names[1:6])} and 2 more; fetch them first"
    )
    write_index(model, {"a": names[0], "b": names[8], "c": names[1]})
    assert error_of(model) == (
        f"/{INDEX}: of the files it names, 1 are missing: {names[1]}; fetch them first"
    )


def test_shards_may_be_numbered_from_zero(model: Path) -> None:
    write_all(model, {f"model-0000{n}-of-00002.safetensors": s for n, s in ((0, A), (1, B))})
    assert read_directory(model).shards == 2


def test_the_precision_in_the_name_separates_two_series(model: Path) -> None:
    write_all(model, {f"model-0000{n}-of-00002.safetensors": s for n, s in ((1, A), (2, B))})
    write_all(model, {"model-00001-of-00002.fp16.safetensors": A})
    assert ".fp16.safetensors" in error_of(model)


@pytest.mark.parametrize(
    "name",
    ["../a", "sub/../../a", "/etc/passwd", "..\\a", "C:\\a", "\\\\host\\a", "", ".", "a\0b", ".."],
)
def test_an_index_that_points_outside_its_directory_is_rejected(model: Path, name: str) -> None:
    write_all(model, {"model.safetensors": A})
    write_index(model, {"a": name})
    assert "which is not a file in its directory" in error_of(model)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the index is not JSON at character 0"),
        ("[]", "the index is not a JSON object"),
        ("{}", "weight_map is not an object of file names"),
        ('{"weight_map": []}', "weight_map is not an object of file names"),
        ('{"weight_map": {"a": 1}}', "weight_map is not an object of file names"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "the index has the name 'a' twice"),
        ('{"weight_map": ' + "[" * 9999, "the index is nested too deeply"),
    ],
)
def test_an_invalid_index_is_rejected(model: Path, text: str, fault: str) -> None:
    write_all(model, {"model.safetensors": A})
    (model / INDEX).write_text(text)
    assert error_of(model).startswith(f"/{INDEX}: {fault}")


def test_links_into_a_cache_are_followed(model: Path) -> None:
    blobs = model / "blobs"
    blobs.mkdir()
    write_all(blobs, {"0f3a": A})
    (model / "model.safetensors").symlink_to("blobs/0f3a")
    write_index(model, {"a": "model.safetensors"})
    assert sizes(read_directory(model)) == {"a": 8}
    (blobs / "0f3a").unlink()
    assert "are missing: model.safetensors" in error_of(model)
    (model / INDEX).unlink()
    assert error_of(model) == "/model.safetensors: is a broken link"


def test_a_pipe_named_like_a_shard_is_rejected_without_waiting(model: Path) -> None:
    os.mkfifo(model / "model.safetensors")
    assert error_of(model) == "/model.safetensors: is not a regular file"
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert error_of(model) == "/config.json: is not a regular file"


def test_pytorch_shards_give_an_upper_bound_marked_as_one(model: Path) -> None:
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"):
        (model / name).write_bytes(b"PK\3\4" + bytes(96))
    for name in ("optimizer.pt", "consolidated.00.pth"):
        (model / name).write_bytes(bytes(1000))
    checkpoint = read_directory(model)
    assert (checkpoint.tensors, checkpoint.weight_bytes_bound) == (None, 200)
    assert (checkpoint.file_bytes, checkpoint.header_bytes, checkpoint.shards) == (200, 0, 2)
    assert set(skipped_files(checkpoint)) == {"optimizer.pt", "consolidated.00.pth"}
    assert "upper bound" in checkpoint.warnings[0]


def test_an_index_of_pytorch_shards_selects_the_set(model: Path) -> None:
    for name in ("one.bin", "two.bin", "pytorch_model.bin"):
        (model / name).write_bytes(bytes(50))
    index = "pytorch_model.bin.index.json"
    write_index(model, {"a": "one.bin", "b": "two.bin"}, index)
    assert read_directory(model).weight_bytes_bound == 100
    write_index(model, {"a": "gone.bin"}, index)
    assert "are missing: gone.bin" in error_of(model)


def test_a_pytorch_file_without_weights_gives_no_bound(model: Path) -> None:
    path = model / "pytorch_model.bin"
    path.write_bytes(b"")
    assert "0 bytes is not a PyTorch file" in error_of(model)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS pointer" in error_of(model)
    path.rename(model / "pytorch_model-00001-of-00002.bin")
    assert "are missing: pytorch_model-00002-of-00002.bin" in error_of(model)


def test_a_directory_with_only_a_config_has_no_tensors_and_a_note(model: Path) -> None:
    checkpoint = read_directory(model)
    assert (checkpoint.tensors, checkpoint.weight_bytes_bound, checkpoint.shards) == (None, None, 0)
    assert checkpoint.warnings == (
        f"{model}: no weight files; the weights are derived from config.json",
    )


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ([], "it is empty; give a directory with config.json"),
        (["model.safetensors"], "no config.json next to model.safetensors; copy the model's own"),
        (["adapters.safetensors", "adapter_config.json"], "no config.json; it holds an adapter"),
        (["README.md"], "no config.json; give a model's directory, or its config.json"),
    ],
)
def test_a_directory_without_a_config_reports_what_is_missing(
    tmp_path: Path, names: list[str], fault: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert error_of(tmp_path).startswith(f": {fault}")


def test_a_broken_config_stops_before_the_weights_are_read(model: Path) -> None:
    (model / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        read_directory(model)


def test_a_name_with_an_escape_sequence_stays_on_one_line(model: Path) -> None:
    write_all(model, {"model.safetensors": A, "x\n\x1b[2J.safetensors": B})
    assert list(skipped_files(read_directory(model))) == ["x\\n\\x1b[2J.safetensors"]
    (model / "model\n.safetensors").write_bytes(b"\1")
    with pytest.raises(CheckpointError, match=r"model\\n\.safetensors: 1 bytes"):
        read_directory(model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_directory_is_reported(model: Path) -> None:
    model.chmod(0)
    try:
        assert error_of(model) == ": permission denied; make it readable first"
    finally:
        model.chmod(0o700)


def test_a_single_file_uses_the_config_in_its_directory(model: Path) -> None:
    write_all(model, {"model.safetensors": A, "model_more.safetensors": B})
    checkpoint = read_file(model / "model_more.safetensors")
    assert sizes(checkpoint) == {"b": 16}
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.warnings == ()


def test_a_single_file_without_a_config_has_only_weights(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00004.safetensors"
    write_safetensors(path, A)
    checkpoint = read_file(path)
    assert (checkpoint.config, sizes(checkpoint)) == ({}, {"a": 8})
    assert checkpoint.warnings == (
        f"{path}: one of 4 shards; give the directory for all of them",
        f"{path}: no config.json next to it; only its weights are known",
    )
