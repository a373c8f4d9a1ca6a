"""`memfit.estimators`: public names that are imported when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import memfit.estimators
from memfit.estimators import Workload, estimate, find_device, open_checkpoint, size

ROOT = Path(__file__).parent.parent
SOURCE = ast.parse((ROOT / "estimators" / "__init__.py").read_text(encoding="utf-8"))


def test_every_public_name_is_typed_and_found() -> None:
    typed = {
        alias.name
        for node in ast.walk(SOURCE)
        if isinstance(node, ast.ImportFrom) and node.module and "estimators" in node.module
        for alias in node.names
    }
    assert typed == set(memfit.estimators.__all__)
    for name in memfit.estimators.__all__:
        assert getattr(memfit.estimators, name).__name__ == name
    assert set(memfit.estimators.__all__) <= set(dir(memfit.estimators))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sise'"):
        memfit.estimators.__getattr__("sise")


def test_the_package_imports_nothing_by_itself() -> None:
    code = "import sys, memfit.estimators; print(*(n for n in sys.modules if 'memfit' in n))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert {name for name in ran.stdout.split() if not name.startswith("__editable__")} == {
        "memfit",
        "memfit.estimators",
    }


def test_three_lines_answer_a_question() -> None:
    sample = ROOT / "sample_configs" / "qwen3-4b-4bit.yaml"
    sized = size(open_checkpoint(str(sample)), device=find_device("m4-max-64"))
    answer = estimate(sized, Workload(prompt_tokens=32768))
    assert answer.verdict == "fits"
    assert answer.peak_bytes > sized.resident_bytes
