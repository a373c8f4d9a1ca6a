"""`memfit.testing`, and pytest with ``--memfit``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from memfit.testing import assert_not_above, assert_peak

POLICY = """\
schema: memfit.policy/1
targets:
  small: {model: qwen3-4b-4bit, memory: 16GB, workload: {context: 16k}, limits: {peak: 90%}}
  large: {model: qwen3-14b-4bit, memory: 8GB, workload: {context: 16k}, limits: {peak: 90%}}
"""
TESTS = """\
import pytest
from memfit.testing import assert_peak

@pytest.mark.memfit
def test_too_much():
    assert_peak("qwen3-4b-4bit", prompt="32k", at_most="7GB", method="formula")

def test_other(): pass
"""


def test_a_peak_is_returned_and_one_above_the_limit_fails() -> None:
    nbytes = assert_peak("qwen3-4b-4bit", "32k", at_most="8GB", method="formula")
    assert nbytes == memfit.open("qwen3-4b-4bit").on("m4-max-64").peak("32k")
    assert_peak("qwen3-4b-4bit", 32768, at_most=nbytes, method="formula")
    with pytest.raises(AssertionError, match="1 more than"):
        assert_peak("qwen3-4b-4bit", "32k", at_most=nbytes - 1, method="formula")


def test_the_installed_classes_are_traced_by_default() -> None:
    pytest.importorskip("mlx_lm")
    with pytest.raises(AssertionError, match="a prompt of 1k tokens takes"):
        assert_peak("qwen3-0.6b", "1k", at_most="1GB")


def test_a_model_is_not_above_its_lock_until_a_figure_is_higher(tmp_path: Path) -> None:
    (tmp_path / "memfit.yaml").write_text(POLICY)
    lock = tmp_path / "memfit.lock.json"
    with pytest.raises(memfit.InputError, match="memfit gate --update writes it"):
        assert_not_above(lock)
    subprocess.run(
        [sys.executable, "-m", "memfit", "gate", "--update"], cwd=tmp_path, capture_output=True
    )
    assert_not_above(lock, method="formula")
    entries = json.loads(lock.read_text())
    entries["targets"]["small"]["figures"]["peak_bytes"] -= 5
    lock.write_text(json.dumps(entries))
    with pytest.raises(AssertionError, match=r"small: peak_bytes is .* 5 more than in the lock"):
        assert_not_above(lock, method="formula")
    assert_not_above(lock, targets=["large"], method="formula")
    del entries["targets"]["large"]
    lock.write_text(json.dumps(entries))
    with pytest.raises(AssertionError, match="large: the lock has no such target"):
        assert_not_above(lock, targets=["large"], method="formula")


@pytest.mark.parametrize(
    ("arguments", "outcome"), [(["--memfit"], "2 failed, 2 passed"), ([], "1 passed, 1 skipped")]
)
def test_pytest_checks_a_policy_and_marked_tests_only_with_the_option(
    tmp_path: Path, arguments: list[str], outcome: str
) -> None:
    (tmp_path / "memfit.yaml").write_text(POLICY)
    (tmp_path / "test_memory.py").write_text(TESTS)
    plugin = ["-p", "memfit.pytest_plugin", "-p", "no:cacheprovider", "-W", "error"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome in run.stdout
    if arguments:
        assert "peak: " in run.stdout
        assert "memfit.yaml::large" in run.stdout
