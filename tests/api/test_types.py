"""Projects that use memfit are checked with its types."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.test_packaging import FOLDERS, ROOT, dotted

CONSUMER = Path(__file__).parent / "consumer" / "launcher.py"


@pytest.mark.exhaustive
def test_mypy_strict_reads_the_types_of_the_installed_package(tmp_path: Path) -> None:
    """Every ignored error of the consumer must be one, as --strict reports unused comments."""
    environment = tmp_path / "environment"
    venv.create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    package = packages / "memfit"
    package.mkdir()
    for file in (ROOT / "api").iterdir():
        (package / file.name).symlink_to(file)
    for folder in FOLDERS[1:]:
        (package / dotted(ROOT / folder).split(".")[1]).symlink_to(ROOT / folder)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    (tmp_path / "launcher.py").write_text(CONSUMER.read_text(encoding="utf-8"))
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull),
            *("--python-executable", environment / "bin" / "python", "launcher.py"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.stdout == "Success: no issues found in 1 source file\n", ran.stdout + ran.stderr
