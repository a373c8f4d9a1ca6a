"""The fixture that runs the command line."""

import pytest

from tests.cli.running import Memfit


@pytest.fixture
def memfit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Memfit:
    """The command line, at a fixed width and without a detected host."""
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("MEMFIT_DEBUG", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    return Memfit(monkeypatch, capsys)
