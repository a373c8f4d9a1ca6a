"""`memfit tune` on ten small real models: every figure, estimated and measured.

Run it in an environment with memfit, mlx-lm and pytest: `python benchmarks/tune_vs_estimate.py`.
It prints a table that docs/accuracy.md sums up, and exits with 1 when weights, a cache or a state
differ by a byte, or a peak by more than docs/accuracy.md allows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from memfit.estimators.runtimes.source import TRACE_ERROR_PERCENT  # noqa: E402
from tests.checkpoints import RECIPES, Checkpoints  # noqa: E402

MODELS = tuple(name for name in RECIPES if name != "no-tokenizer")
COMMAND = (sys.executable, "-c", "from memfit.cli.__main__ import main; main()", "tune")
WORKLOAD = ("--prompt-tokens", "513", "--prefill-step", "256", "--max-tokens", "8")
EXACT = ("weights", "kv", "kv_held", "ssm")
PEAKS = ("prefill_peak", "decode_peak", "workspace")


class Figure(NamedTuple):
    """Bytes estimated and measured."""

    estimated: int
    measured: int

    @property
    def percent(self) -> float:
        """How far the estimate is above the measurement, as a share of the measurement."""
        return 100 * (self.estimated - self.measured) / self.measured


class Row(NamedTuple):
    """The figures of one model, by the names of `memfit tune --json`."""

    name: str
    model_type: str
    figures: dict[str, Figure]
    unaccounted: int
    spread: int  # of the peak, over the repeats

    @property
    def is_exact(self) -> bool:
        """Whether weights, cache and state equal the estimate, to the byte."""
        return all(self.figures[n].estimated == self.figures[n].measured for n in EXACT)

    @property
    def is_within_error(self) -> bool:
        return abs(self.figures["peak"].percent) <= TRACE_ERROR_PERCENT


def tuned(name: str, path: Path, home: Path, workload: tuple[str, ...] = WORKLOAD) -> Row:
    """Run the whole command on one checkpoint."""
    environment = {**os.environ, "MEMFIT_HOME": str(home)}
    command = (*COMMAND, str(path), *workload, "--json")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return _row(name, json.loads(done.stdout))


def _row(name: str, data: dict[str, Any]) -> Row:
    asked = data["points"][0]
    by_name = {figure["name"]: figure for figure in asked["figures"]}
    both = {
        figure: Figure(values["estimated_bytes"], values["measured_bytes"])
        for figure, values in by_name.items()
        if values["estimated_bytes"] is not None
    }
    unaccounted = by_name["unaccounted"]["measured_bytes"]
    spread = by_name["peak"]["spread_bytes"]
    return Row(name, data["model"]["model_type"], both, unaccounted, spread)


def written(rows: list[Row]) -> str:
    heads = ("model", "class", *EXACT, *PEAKS, "peak, measured", "spread", "unaccounted")
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "--:|" * (len(heads) - 2)]
    for row in rows:
        cells = [_exactness(row.figures[name]) for name in EXACT]
        cells += [f"{row.figures[name].percent:+.1f} %" for name in PEAKS]
        cells += [f"{n:,}" for n in (row.figures["peak"].measured, row.spread, row.unaccounted)]
        numbers = " | ".join(cells).replace("-", "−")
        lines.append(f"| {row.name} | {row.model_type} | {numbers} |")
    return "\n".join(lines)


def _exactness(figure: Figure) -> str:
    difference = figure.measured - figure.estimated
    return f"{figure.measured:,}" + (f" ({difference:+,})" if difference else "")


def main() -> None:
    """Print one row per model, and every deviation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models with this in their name")
    only = parser.parse_args().only
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory))
        for name in MODELS:
            if only in name:
                rows.append(tuned(name, checkpoints(name), Path(directory) / "home"))
    print(written(rows))
    wrong = [row.name for row in rows if not (row.is_exact and row.is_within_error)]
    if wrong:
        sys.exit(f"not as it should be: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
