"""Compare published peaks of one rank of several with memfit's, by both methods.

Run from the checkout: ``python -m benchmarks.published_ranks``. The rows are `mlx_lm.benchmark` on
M3 Ultras with 512 GB (mlx 0.30.7, mlx-lm 0.30.8, 100 tokens generated, 4 bits in groups of 64).
They are sized by the rules of these versions; a trace runs the installed classes. The benchmark's
peak is never reset, so that of the load is part of it.
"""

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.questions.target import Ranks
from memfit.estimators.runtimes.registry import with_versions
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.ranks import ranked
from memfit.estimators.sizing.sized_model import SizedModel

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tests" / "published" / "ranks" / "peaks.jsonl"
_CATALOG = Catalog(versioned=partial(with_versions, mlx=(0, 30, 7), mlx_lm=(0, 30, 8)))


def main() -> None:
    """Print each row with the estimates and their errors."""
    print("| model | ranks | prompt | published | trace | | formula | |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for row in read_rows():
        published: float = row["peak_gb"]
        cells = [f"{row['model']}", f"{row['ranks']} {row['parallel']}", f"{row['prompt_tokens']}"]
        cells.append(f"{published:.1f} GB")
        for method in ("trace", "formula"):
            predicted = predict(row, method) / 1e9
            error = f"{100 * (predicted / published - 1):+.1f} %".replace("+0.0", "0.0")
            cells += [f"{predicted:.1f} GB", error]
        print(f"| {' | '.join(cells)} |", flush=True)


def read_rows() -> Iterator[dict[str, Any]]:
    for line in ROWS.read_text().splitlines():
        yield json.loads(line)


def predict(row: dict[str, Any], method: MethodSetting) -> int:
    """Return the largest peak of a rank, the load included."""
    workload, ranks = _ranks(row, method)
    return max(rank.figures_for(workload).moment.nbytes for rank in ranks)


def predict_range(row: dict[str, Any], method: MethodSetting) -> tuple[int, int]:
    """Return the range that an estimate of the largest rank states."""
    workload, ranks = _ranks(row, method)
    largest = max(ranks, key=lambda rank: rank.figures_for(workload).moment.nbytes)
    return estimate(largest, workload, advises=False).peak_range_bytes


def _ranks(row: dict[str, Any], method: MethodSetting) -> tuple[Workload, list[SizedModel]]:
    quantize = converted(row["bits"]) if row["bits"] else None
    sized = _CATALOG.sized(
        str(ROOT / row["config"]), quantize=quantize, device=_device(), method=method
    )
    workload = Workload(prompt_tokens=row["prompt_tokens"], max_tokens=100)
    shared = ranked(sized, Ranks(row["ranks"], row["parallel"]))
    return workload, list({id(rank): rank for rank in shared.ranks}.values())


@cache
def _device() -> Device:
    return find_device("m3-ultra-512")


if __name__ == "__main__":
    main()
