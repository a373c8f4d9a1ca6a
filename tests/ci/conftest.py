"""A repository that uses memfit, and a machine on which pip installs it without a network."""

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from memfit.cli.app import main
from tests.models import QWEN3_4B_4BIT, write_config

ROOT = Path(__file__).parents[2]
_PARTS = ("api", "cli", "estimators", "probes", "sample_configs", "docs/schema", ".ci")
_FILES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "action.yml",
    ".pre-commit-hooks.yaml",
)
_NEEDED = ("setuptools", "typer")  # all other requirements are installed next to typer
REQUIREMENT_LINES = [
    line.rstrip(" \\")
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    if line[0] not in " #"
]
_LEAST_SETUPTOOLS = 77


def requirements() -> list[Requirement]:
    """What requirements.txt installs for this Python and platform."""
    found = map(Requirement, REQUIREMENT_LINES)
    return [each for each in found if not each.marker or each.marker.evaluate()]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What requirements.txt names, in the versions installed here, as wheels."""
    if int(metadata.version("setuptools").partition(".")[0]) < _LEAST_SETUPTOOLS:
        pytest.skip(f"building a wheel needs setuptools {_LEAST_SETUPTOOLS}")
    folder = tmp_path_factory.mktemp("wheels")
    for each in requirements():
        _repack(metadata.distribution(each.name), folder)
    return folder


def _repack(distribution: metadata.Distribution, folder: Path) -> None:
    name = distribution.metadata["Name"].replace("-", "_")
    wheel = message_from_string(distribution.read_text("WHEEL") or "")
    tag = (wheel.get_all("Tag") or [])[-1]  # the first of some is of Python 2
    path = folder / f"{name}-{distribution.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file in distribution.files or ():
            if not {"..", "__pycache__"}.intersection(file.parts):
                archive.write(str(file.locate()), str(file))


@pytest.fixture(scope="session")
def source(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, because pip writes into the folder that it builds."""
    copy = tmp_path_factory.mktemp("source")
    for part in _PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in _FILES:
        shutil.copy(ROOT / file, copy)
    (copy / "requirements.txt").write_text(
        "".join(
            f"{name}=={version} --hash=sha256:{sha256(path.read_bytes()).hexdigest()}\n"
            for path in wheels.iterdir()
            for name, version in [path.name.split("-")[:2]]
        )
    )
    git(copy, "init", "--quiet")
    git(copy, "add", ".")
    git(copy, "commit", "--quiet", "--message", "memfit")
    git(copy, "tag", "v0.2.0")
    return copy


@pytest.fixture(scope="session")
def machine(wheels: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine without a network; its pip and git find what is here."""
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
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the value of --no-build-isolation
        "PYTHONPATH": str(
            libraries
        ),  # for a pip that is not isolated: MLX is too large for a wheel
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{source}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/OWNER/memfit",
    }


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
