"""`memfit` and `memfit.estimators`: public names that are imported when they are used."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import memfit
import memfit.estimators
from memfit.estimators import Workload, estimate, find_device, open_checkpoint, size
from tests.test_imports import modules_after

ROOT = Path(__file__).parent.parent
PACKAGES = {"memfit": memfit, "memfit.estimators": memfit.estimators}
by_package = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)


@by_package
def test_every_public_name_is_typed_and_found(package: ModuleType) -> None:
    source = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    typed = {
        alias.name
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("memfit.")
        for alias in node.names
    }
    assert typed == set(package.__all__)
    assert sorted(package.__all__) == package.__all__
    for name in package.__all__:
        assert getattr(getattr(package, name), "__name__", name) == name
    assert set(package.__all__) <= set(dir(package))


@by_package
def test_an_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no attribute 'sise'"):
        package.__getattr__("sise")


@pytest.mark.parametrize(
    ("name", "allowed"), [("memfit", ""), ("memfit.estimators", "import importlib, typing")]
)
def test_a_package_imports_nothing_by_itself(name: str, allowed: str) -> None:
    """One larger module of the standard library would take most of 20 ms."""
    imported = modules_after(f"import {name}") - modules_after(allowed)
    assert {each for each in imported if not each.startswith("__editable__")} == {"memfit", name}


def test_the_package_runs_as_the_command_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "memfit", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, f"memfit {memfit.__version__}\n")


def test_three_lines_answer_a_question() -> None:
    sample = ROOT / "sample_configs" / "qwen3-4b-4bit.yaml"
    sized = size(open_checkpoint(str(sample)), device=find_device("m4-max-64"))
    answer = estimate(sized, Workload(prompt_tokens=32768))
    assert answer.verdict == "fits"
    assert answer.peak_bytes > sized.resident_bytes
    asked = memfit.estimate(sample, device="m4-max-64", context="32k")
    assert asked.to_dict() == answer.to_dict()
