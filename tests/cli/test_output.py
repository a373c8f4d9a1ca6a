"""Files that are asked for: whole, and with the permissions a plain write would leave."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.cli.render.output import write_whole


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_can_be_read_by_whoever_the_umask_lets(tmp_path: Path) -> None:
    write_whole(tmp_path / "report.md", "text")
    assert stat.S_IMODE((tmp_path / "report.md").stat().st_mode) == 0o644


def test_a_file_that_is_there_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text("old")
    path.chmod(0o640)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]
