"""GGUF files, series and directories: combined, complete, and never a guess."""

from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.errors import CheckpointError, MemfitError, UnsupportedError
from memfit.estimators.checkpoint.gguf.files import series
from memfit.estimators.checkpoint.opening import open_checkpoint
from tests.gguf.writing import recorded, tensor, write

LLAMA = {"general.architecture": "llama"}
WEIGHTS = tuple(tensor(f"blk.{i}.attn_q.weight", (64, 64), "Q4_0") for i in range(6))


def write_series(folder: Path, total: int = 3, **changed: Any) -> list[Path]:
    """Write a split model: metadata in the first file only, as gguf-split writes it."""
    paths = []
    for number in range(total):
        own = {
            "split.no": number,
            "split.count": total,
            "split.tensors.count": len(WEIGHTS),
            **changed,
        }
        metadata = {**LLAMA, **own} if number == 0 else own
        name = f"big-{number + 1:05d}-of-{total:05d}.gguf"
        paths.append(write(folder / name, metadata, WEIGHTS[2 * number : 2 * number + 2]))
    return paths


def error_of(path: Path) -> str:
    with pytest.raises(MemfitError) as caught:
        open_checkpoint(str(path))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_any_file_of_a_series_opens_the_whole_series(tmp_path: Path) -> None:
    paths = write_series(tmp_path)
    for path in paths:
        checkpoint = open_checkpoint(str(path))
        assert checkpoint.tensors == WEIGHTS
        assert checkpoint.shards == 3
        assert checkpoint.config["general.architecture"] == "llama"
        assert checkpoint.file_bytes == sum(p.stat().st_size for p in paths)
        assert [name for name, _ in checkpoint.header_sha256] == [p.name for p in paths]
    assert open_checkpoint(str(tmp_path)).tensors == WEIGHTS


def test_a_missing_file_of_a_series_is_reported(tmp_path: Path) -> None:
    write_series(tmp_path)[1].unlink()
    line = error_of(tmp_path / "big-00001-of-00003.gguf")
    assert "of 3 files of the series, 1 are missing: big-00002-of-00003.gguf" in line


def test_a_file_of_another_series_is_rejected(tmp_path: Path) -> None:
    paths = write_series(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    assert "calls itself file 1 of 3, counted from 0; it should be 2 of 3" in error_of(paths[0])


def test_a_tensor_in_two_files_is_rejected(tmp_path: Path) -> None:
    paths = write_series(tmp_path)
    write(paths[1], {"split.no": 1, "split.count": 3}, WEIGHTS[:2])
    assert "is in another file too" in error_of(paths[0])


def test_the_number_of_split_tensors_must_match_the_header(tmp_path: Path) -> None:
    paths = write_series(tmp_path, **{"split.tensors.count": 7})
    assert "split.tensors.count: 7, but the files hold 6 tensors" in error_of(paths[0])


def test_a_renamed_file_of_a_series_is_not_read_as_the_whole_model(tmp_path: Path) -> None:
    renamed = write_series(tmp_path)[0].rename(tmp_path / "model.gguf")
    assert "is one of 3 files of a split model" in error_of(renamed)


@pytest.mark.parametrize("name", ["a-00003-of-00002.gguf", "a-00000-of-00002.gguf"])
def test_invalid_series_numbers_are_rejected(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not part of a series"):
        series(name)


def test_a_directory_of_one_model_is_that_model_without_the_projector(tmp_path: Path) -> None:
    write(tmp_path / "gemma-Q4_K_M.gguf", LLAMA, WEIGHTS)
    projector = write(tmp_path / "mmproj-model-f16.gguf", {"general.architecture": "clip"}, WEIGHTS)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensors == WEIGHTS
    assert [(left.name, left.nbytes) for left in checkpoint.skipped_files] == [
        (projector.name, projector.stat().st_size)
    ]


def test_a_directory_of_several_models_requires_a_choice(tmp_path: Path) -> None:
    write_series(tmp_path)
    write(tmp_path / "small.gguf", LLAMA, WEIGHTS)
    line = error_of(tmp_path)
    assert "holds 2 GGUF models, big-00001-of-00003.gguf, small.gguf; name one" in line


def test_lm_studio_folders_are_ordinary_paths(tmp_path: Path) -> None:
    folder = tmp_path / ".lmstudio" / "models" / "publisher" / "model-GGUF"
    folder.mkdir(parents=True)
    write(folder / "model-Q4_K_M.gguf", LLAMA, WEIGHTS)
    assert open_checkpoint(str(folder)).tensors == WEIGHTS


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        ({"general.architecture": "clip"}, "a vision projector"),
        ({**LLAMA, "general.type": "adapter"}, "an adapter"),
        ({**LLAMA, "general.type": "imatrix"}, "an importance matrix"),
    ],
)
def test_a_file_that_is_not_a_model_is_reported(
    tmp_path: Path, metadata: dict[str, Any], fault: str
) -> None:
    path = write(tmp_path / "a.gguf", metadata, WEIGHTS)
    with pytest.raises(UnsupportedError, match=fault):
        open_checkpoint(str(path))


def test_a_vocabulary_file_is_not_a_model(tmp_path: Path) -> None:
    assert "holds no tensors" in error_of(write(tmp_path / "vocab.gguf", LLAMA))


def test_recorded_models_keep_their_file_length(tmp_path: Path) -> None:
    entry = recorded()["qwen3"]
    path = write(tmp_path / "qwen3.gguf", entry.metadata, entry.tensors)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.tensors == entry.tensors
    assert checkpoint.file_bytes - checkpoint.header_bytes >= sum(t.nbytes for t in entry.tensors)
