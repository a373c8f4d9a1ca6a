"""Atomic writes: complete or not at all, and nothing else is left in the directory."""

import stat
from pathlib import Path

import pytest

from memfit.estimators.base.files import write_atomically


@pytest.mark.parametrize(("mode", "expected"), [(None, 0o600), (0o644, 0o644), (0o400, 0o400)])
@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_written_with_its_mode(
    tmp_path: Path, mode: int | None, expected: int, durable: bool
) -> None:
    path = tmp_path / "file"
    for content in (b"old", b"new"):
        assert write_atomically(path, content, mode=mode, durable=durable)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == expected
    assert list(tmp_path.iterdir()) == [path]


def test_without_overwrite_an_existing_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert write_atomically(path, b"old", overwrite=False)
    assert not write_atomically(path, b"new", overwrite=False)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    (path / "kept").touch()
    with pytest.raises(OSError, match="directory"):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert list(path.iterdir()) == [path / "kept"]
