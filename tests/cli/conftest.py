"""Fixtures of the command line."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit


@pytest.fixture
def memfit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Memfit:
    """The command line, at a fixed width and without a detected host."""
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("MEMFIT_DEBUG", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    return Memfit(monkeypatch, capsys)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's measurements; it is not there yet."""
    monkeypatch.setenv("MEMFIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def empty_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The current directory: a relative path in a test names nothing that the test did not make."""
    directory = tmp_path_factory.mktemp("empty")
    monkeypatch.chdir(directory)
    return directory
