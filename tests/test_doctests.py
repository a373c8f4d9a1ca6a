"""The examples in docstrings are correct."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.test_packaging import dotted

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    dotted(path)
    for part in ("api", "cli", "estimators", "probes")
    for path in (ROOT / part).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_correct(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
