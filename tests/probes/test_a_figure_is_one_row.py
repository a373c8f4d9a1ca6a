"""A further measured figure is one row in ``probes/figures.py``; docs/tune.md has a row for each.

``python -m tests.probes.test_a_figure_is_one_row`` rewrites the table of the page.
"""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.probes.figures import FIGURES
from tests.checkpoints import Checkpoints

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tune.md"
_TABLE = re.compile(r"\| Row, and its name in JSON .*?(?=\n\n)", re.DOTALL)
ROW = """_DECLARED = (
    Figure(
        name="layers",
        label="Caches at the end",
        meaning="how many there are",
        at_end=lambda moment: len(moment.caches),
        estimated=lambda of: of.cache(len(of.sized.model.layers)),
    ),"""


def table() -> str:
    """Return the table of docs/tune.md."""
    rows = [f"| {f.label.strip()}, `{f.name}` | {f.meaning} |" for f in FIGURES.values()]
    return "\n".join(["| Row, and its name in JSON | What is measured |", "|---|---|", *rows])


def test_the_page_has_every_figure() -> None:
    """After a change run ``make docs``."""
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table()


def test_a_figure_that_is_added_to_the_table_is_measured_estimated_saved_and_shown(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm", reason="the model that runs is mlx-lm's")
    path = checkpoints("dense")
    package = tmp_path / "memfit"
    shutil.copytree(ROOT / "api", package)
    for name in ("cli", "estimators", "sample_configs"):
        (package / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "probes", package / "probes")
    figures = package / "probes" / "figures.py"
    figures.write_text(figures.read_text().replace("_DECLARED = (", ROW, 1))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "MEMFIT_HOME": str(tmp_path / "home"),
        "COLUMNS": "100",
    }

    def memfit(*arguments: str) -> str:
        command = (sys.executable, "-m", "memfit.cli", *arguments)
        return subprocess.run(
            command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    workload = ("--prompt-tokens", "20", "--max-tokens", "3")
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    (tuned,) = csv.DictReader(io.StringIO(memfit("tune", str(path), *workload, "--format", "csv")))
    assert tuned["layers_measured_bytes"] == tuned["layers_estimated_bytes"] == str(layers)
    (kept,) = json.loads(memfit("measurements", "export"))["measurements"]
    assert {tuple(run["more"][0]) for run in kept["runs"]} == {("layers_bytes", layers)}
    assert "Caches at the end" in memfit("measurements", "show", kept["id"])


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")))
