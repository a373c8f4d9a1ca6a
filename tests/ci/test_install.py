"""The installation that README shows, on a machine without a network."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from memfit.estimators.base.version import __version__
from tests.ci.conftest import ROOT

# .ci/test-wheel runs the line of uvx, which would need packages from an index.
LINES = re.findall(r"^pip install \S+", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.exhaustive
@pytest.mark.parametrize("line", LINES)
def test_an_install_line_of_the_readme_installs_memfit(
    line: str, source: Path, machine: dict[str, str], tmp_path: Path
) -> None:
    checkout = shutil.copytree(source, tmp_path / "checkout")
    script = f"python3 -m venv venv; . venv/bin/activate; {line}; venv/bin/memfit --version"
    done = subprocess.run(
        ["bash", "-ec", script], cwd=checkout, env=machine, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"memfit {__version__}" in done.stdout.splitlines()
