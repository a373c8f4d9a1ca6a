"""The fixture that runs the command line."""

import pytest

from tests.cli.running import Memfit


@pytest.fixture
def memfit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Memfit:
    """The command line, at a fixed width and with no host to detect."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("MEMFIT_DEBUG", raising=False)
    return Memfit(monkeypatch, capsys)
