"""What a killed process was writing is removed by the next one, and nothing else is."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memfit.estimators.base.files import write_atomically
from memfit.estimators.base.unfinished import UNFINISHED, unfinished_folder

# A process in the middle of a file, a folder, and a folder for temporary files.
WRITING = """
import sys
from pathlib import Path
from memfit.estimators.base.unfinished import unfinished_file, unfinished_folder
here = Path(sys.argv[1])
with unfinished_file(here, suffix=".safetensors"), unfinished_folder(here) as folder:
    with unfinished_folder() as temporary:
        for each in (folder, temporary):
            (each / "half").write_text("of a file")
        print(flush=True)
        sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those that it starts."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return path


@contextmanager
def writing(directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        (sys.executable, "-c", WRITING, str(directory)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def unfinished(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name.startswith(UNFINISHED)}


def test_what_a_killed_process_left_is_removed_and_a_living_one_keeps_its_own(
    tmp_path: Path, temporary: Path
) -> None:
    with writing(tmp_path):
        living, kept = unfinished(tmp_path), unfinished(temporary)
        assert (len(living), len(kept)) == (2, 1)
        with writing(tmp_path) as killed:
            assert len(unfinished(tmp_path)) == 4
            killed.kill()
        assert len(unfinished(tmp_path)) == 4
        assert write_atomically(tmp_path / "memfit.lock.json", b"{}")
        with unfinished_folder() as own:
            assert unfinished(temporary) == {own.name, *kept}
        assert unfinished(tmp_path) == living
        assert unfinished(temporary) == kept


def test_only_what_memfit_made_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").touch()
    link = tmp_path / f"{UNFINISHED}abcdefgh"
    link.symlink_to(target)
    others = [
        tmp_path / name for name in (".unfinished-abcdefgh", f"{UNFINISHED}notes", "memfit-x")
    ]
    for path in others:
        path.touch()
    assert write_atomically(tmp_path / "file", b"")
    assert (target / "precious").exists()
    assert all(path.exists() for path in (link, *others))
