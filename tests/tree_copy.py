"""A copy of the product that a test changes as CONTRIBUTING says, and runs in its own process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PARTS = ("api", "cli", "estimators", "probes", "sample_configs", "docs/schema", ".ci")


class TreeCopy:
    """The copied tree; paths are those of the repository, such as ``cli/app.py``."""

    def __init__(self, folder: Path) -> None:
        """Copy the product into an empty folder; compiled modules are copied and stay valid."""
        self.folder = folder
        for part in _PARTS:
            shutil.copytree(ROOT / part, folder / part)
        subprocess.run([folder / ".ci" / "link-tree"], check=True, timeout=60)

    def write(self, path: str, text: str) -> None:
        """Write a file, and the folders above it."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text, encoding="utf-8")

    def insert(self, path: str, before: str, text: str) -> None:
        """Insert text before a text that the file has exactly once."""
        content = (self.folder / path).read_text(encoding="utf-8")
        assert content.count(before) == 1, f"{path}: {content.count(before)} times {before!r}"
        self.write(path, content.replace(before, f"{text}{before}"))

    def run(
        self, *arguments: str | Path, module: str = "memfit"
    ) -> subprocess.CompletedProcess[str]:
        """Run a module of the copy in the copy's folder, by default the command line."""
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder / ".tree"), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=120,
        )
