"""`memfit`: public names that are imported when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from tests.test_imports import modules_after

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_typed_and_found() -> None:
    source = ast.parse(Path(str(memfit.__file__)).read_text(encoding="utf-8"))
    typed = {
        alias.name
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("memfit.")
        for alias in node.names
    }
    assert typed == set(memfit.__all__)
    assert sorted(memfit.__all__) == memfit.__all__
    for name in memfit.__all__:
        assert getattr(getattr(memfit, name), "__name__", name) == name
    assert set(memfit.__all__) <= set(dir(memfit))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sise'"):
        memfit.__getattr__("sise")


@pytest.mark.parametrize("name", ["memfit", "memfit.estimators"])
def test_a_package_imports_nothing_by_itself(name: str) -> None:
    """One larger module of the standard library would take most of 20 ms."""
    imported = modules_after(f"import {name}") - modules_after("")
    assert {each for each in imported if not each.startswith("__editable__")} == {"memfit", name}


def test_the_package_runs_as_the_command_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "memfit", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, f"memfit {memfit.__version__}\n")
