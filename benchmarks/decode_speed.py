"""Compare published decode speeds with memfit's upper bound; see docs/accuracy.md.

Run from the checkout: ``python -m benchmarks.decode_speed DIRECTORY``. The directory has a file
``speeds.jsonl`` with a row per run (model, prompt_tokens, max_tokens, decode_tok_s) and a folder
``configs``. It prints how far the expected speed of each kind of model is from these runs, which
it was not read from, and the share of the bound that they reach.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import find_device
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.decode_speed import decode_speed, kind

DEVICE = "m5-max-128"
# A run of fewer tokens times a call that returns before the GPU is done.
SHORTEST_RUN = 16
# Names of rows, and the config of the folder that has the model's layers.
CONFIGS = {
    "qwen3-coder-next": "qwen3-next",
    "gemma-4-26b": "gemma-4-26b-a4b",
    "gemma-4-31b": "gemma-4-31b",
    "gemma-4-e2b": "gemma-4-e2b",
    "gemma-4-e4b": "gemma-4-e4b",
    "qwen3-4b": "qwen3-4b",
    "qwen3.5-9b": "qwen3.5-9b",
    "qwen3.6-27b": "qwen3.6-27b",
    "qwen3.6-35b": "qwen3.6-35b-a3b",
}


class Run(NamedTuple):
    """One published run: its model's kind, its measured speed, the bound and what to expect."""

    name: str
    kind: str
    measured: float
    most: float
    expected: float

    @property
    def share(self) -> float:
        """The part of the bound that it reached."""
        return self.measured / self.most

    @property
    def error(self) -> float:
        """How far the expected speed is above the measured one, as a part of it."""
        return self.expected / self.measured - 1


def runs(directory: Path) -> Iterator[Run]:
    """Yield the runs with the model and bits that their row names."""
    catalog, device = Catalog(), find_device(DEVICE)
    for line in (directory / "speeds.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        name = row["model"].lower().replace("_", "-").replace("qwen3-6-", "qwen3.6-")
        config = next((file for start, file in CONFIGS.items() if name.startswith(start)), None)
        bits = re.search(r"-([4568])bit", name)
        known = config and bits and "ud-mlx" not in name  # a mixed recipe
        if not known or row["max_tokens"] < SHORTEST_RUN or not row.get("decode_tok_s"):
            continue
        assert bits
        sized = catalog.sized(
            str(directory / "configs" / f"{config}.json"),
            quantize=Quantization(int(bits[1]), 64),
            device=device,
        )
        speed = decode_speed(sized, Workload(prompt_tokens=row["prompt_tokens"]))
        assert speed
        yield Run(
            f"{config} {bits[1]} bits, {row['prompt_tokens']} tokens",
            kind(sized.model),
            row["decode_tok_s"],
            speed.most_tokens_per_second,
            (speed.expected_tokens_per_second or (0, 0))[1],
        )


def main() -> None:
    """Print the shares and errors by kind, and the run that is closest to its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    shares: dict[str, list[Run]] = defaultdict(list)
    for run in runs(parser.parse_args().directory):
        shares[run.kind].append(run)
    for group, found in shares.items():
        tenths = quantiles((run.share for run in found), n=10, method="inclusive")
        low, middle, high = (f"{100 * tenths[index]:.1f} %" for index in (0, 4, 8))
        closest = max(found, key=lambda run: run.share)
        print(f"{group}: {len(found)} runs, {low}, {middle}, {high}; most {closest.share:.3f}")
        print(f"  {closest.name}: {closest.measured} of {closest.most} tokens a second")
        errors = sorted(100 * run.error for run in found)
        print(
            f"  expected: median {median(errors):+.1f} %, {errors[0]:+.1f} to {errors[-1]:+.1f} %"
        )


if __name__ == "__main__":
    main()
