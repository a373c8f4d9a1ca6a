"""The installation that README shows, on a machine without a network."""

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from memfit.estimators.base.version import __version__
from tests.ci.conftest import REQUIREMENT_LINES, ROOT, requirements

# .ci/test-wheel runs the line of uvx, which would need packages from an index.
LINES = re.findall(r"^pip install \S+", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)


def test_all_that_ci_installs_is_pinned_with_hashes_in_allowed_versions() -> None:
    blocks = re.findall(
        r"^(\S.*?) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
        (ROOT / "requirements.txt").read_text(),
        re.M,
    )
    pinned = requirements()
    assert len(blocks) == len(REQUIREMENT_LINES)
    versions = {each.name: str(each.specifier).removeprefix("==") for each in pinned}
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["build-system"]["requires"]
    for each in map(Requirement, wanted):
        assert each.specifier.contains(versions[each.name]), each
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        assert versions.get(name, version) == version
    # What one of them needs is pinned too.
    for each in pinned:
        for line in metadata.requires(each.name) or ():
            needed = Requirement(line)
            if not needed.marker or needed.marker.evaluate({"extra": ""}):
                assert needed.name.lower().replace("_", "-") in versions, (each.name, line)


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
