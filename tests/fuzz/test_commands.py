"""Whole commands on arguments and files from outside, and with faults of the file system."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_campaign(script: str, *options: str) -> None:
    """Run a script of benchmarks/fuzz in its own process: it sets the environment of memfit."""
    command = [sys.executable, "-m", f"benchmarks.fuzz.{script}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_corpus_and_some_commands_give_an_answer_or_a_clear_line() -> None:
    run_campaign("fuzz_commands", "--count", "120")


@pytest.mark.exhaustive
def test_many_commands_give_an_answer_or_a_clear_line() -> None:
    run_campaign("fuzz_commands", "--first", "1000", "--count", "500")


preloaded = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)


@preloaded
def test_some_faults_of_the_file_system_leave_nothing_half_written() -> None:
    run_campaign("inject_faults", "--every", "60")


@preloaded
@pytest.mark.exhaustive
def test_many_faults_of_the_file_system_leave_nothing_half_written() -> None:
    run_campaign("inject_faults", "--every", "3")
