"""A repository that uses memfit, and a machine on which pip installs it without a network."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from memfit.cli.app import main
from tests.models import QWEN3_4B_4BIT, write_config

ROOT = Path(__file__).parents[2]
_PARTS = ("cli", "estimators", "probes", "sample_configs")
_FILES = ("pyproject.toml", "README.md", "LICENSE", "action.yml", ".pre-commit-hooks.yaml")
_NEEDED = ("setuptools", "typer")  # all other requirements are installed next to typer
_LEAST_SETUPTOOLS = 77


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, because pip writes into the folder that it builds."""
    copy = tmp_path_factory.mktemp("source")
    for part in _PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in _FILES:
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine without a network; its pip finds the packages installed here."""
    if int(metadata.version("setuptools").partition(".")[0]) < _LEAST_SETUPTOOLS:
        pytest.skip(f"building a wheel needs setuptools {_LEAST_SETUPTOOLS}")
    libraries = tmp_path_factory.mktemp("libraries")
    for name in _NEEDED:
        for entry in Path(str(metadata.distribution(name).locate_file(""))).iterdir():
            # Without the memfit of these tests: pip would find it and install nothing.
            known = (libraries / entry.name).exists()
            if not known and "memfit" not in entry.name and entry.suffix != ".pth":
                (libraries / entry.name).symlink_to(entry)
    return {
        "HOME": str(tmp_path_factory.mktemp("home")),
        "LANG": "C.UTF-8",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.defpath)),
        "PIP_NO_COMPILE": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the value of --no-build-isolation
        "PYTHONPATH": str(libraries),
    }


@pytest.fixture(scope="session")
def wheel(source: Path, machine: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of memfit, which installs faster than a checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    script = f"python3 -m venv venv && venv/bin/pip wheel --quiet --no-deps '{source}'"
    subprocess.run(["bash", "-ec", script], cwd=folder, env=machine, check=True, timeout=300)
    (built,) = folder.glob("memfit-*.whl")
    return built


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Git repository with a model, a policy and its baseline."""
    workspace = tmp_path / "repository"
    write_config(workspace / "models" / "chat", QWEN3_4B_4BIT)
    monkeypatch.chdir(workspace)
    for arguments in (["gate", "init", "models/chat", "--device", "m1-8"], ["gate", "--update"]):
        monkeypatch.setattr(sys, "argv", ["memfit", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert not exit_.value.code
    git(workspace, "init", "--quiet")
    git(workspace, "add", ".")
    git(workspace, "commit", "--quiet", "--message", "A model that fits")
    return workspace


def git(workspace: Path, *arguments: str) -> str:
    """Run git as a fixed author."""
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    done = subprocess.run(
        ["git", *who, *arguments], cwd=workspace, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
