"""What .ci/release writes for other installers, by their own rules; .ci/test-wheel installs it."""

import hashlib
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from memfit.estimators.base.version import __version__
from tests.ci.conftest import ROOT

ADDRESS = "https://example.org/somebody/memfit"
WHEEL, SDIST = f"memfit-{__version__}-py3-none-any.whl", f"memfit-{__version__}.tar.gz"
RELEASE = f"{ADDRESS}/releases/download/v{__version__}"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    for name in (WHEEL, SDIST):
        (tmp_path / name).write_text(name)
    return tmp_path


def release(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / ".ci/release"), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True)


def sha256_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def test_without_an_address_only_the_checksums_are_written(dist: Path) -> None:
    done = release(dist)
    assert (done.returncode, "REPOSITORY in setup.py is empty" in done.stderr) == (1, True)
    lines = [f"{sha256_of(name)}  {name}" for name in sorted((WHEEL, SDIST))]
    assert (dist / "SHA256SUMS").read_text().splitlines() == lines
    assert {each.name for each in dist.iterdir()} == {WHEEL, SDIST, "SHA256SUMS"}


def test_the_formula_names_the_sdist_and_its_checksum(dist: Path) -> None:
    assert release(dist, ADDRESS).returncode == 0
    text = (dist / "memfit.rb").read_text()
    assert f'url "{RELEASE}/{SDIST}"\n  sha256 "{sha256_of(SDIST)}"' in text
    # What it runs is in the sdist, and installs what requirements.txt pins.
    called = re.search(r'system "(\S+)", libexec', text)
    assert called
    assert (ROOT / called[1]).exists()
    if ruby := shutil.which("ruby"):
        subprocess.run([ruby, "-c", dist / "memfit.rb"], check=True, capture_output=True)


def test_the_extension_follows_the_rules_of_hf(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extensions: Any = pytest.importorskip("huggingface_hub.cli.extensions")
    assert release(dist, ADDRESS).returncode == 0
    project = tomli.loads((dist / "hf-memfit/pyproject.toml").read_text())["project"]
    _, repository, short_name = extensions._normalize_repo_id("somebody/hf-memfit")
    assert repository == project["name"]
    scripts = project["scripts"]
    assert callable(pkgutil.resolve_name(scripts[extensions._get_executable_name(short_name)]))
    (dependency,) = project["dependencies"]
    assert dependency == f"memfit @ {RELEASE}/{WHEEL}#sha256={sha256_of(WHEEL)}"
    # hf reads it line by line.
    assert f'description = "{project["description"]}"' in (
        (dist / "hf-memfit/pyproject.toml").read_text().splitlines()
    )
