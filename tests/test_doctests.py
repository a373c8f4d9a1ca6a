"""The examples in docstrings are correct."""

import doctest
import importlib
from pathlib import Path

from tests.test_packaging import dotted

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    dotted(path)
    for part in ("api", "cli", "estimators", "probes")
    for path in (ROOT / part).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_examples_in_docstrings_are_correct() -> None:
    assert len(MODULES) > 50
    results = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    wrong = [name for name, result in results.items() if result.failed or not result.attempted]
    assert wrong == []
