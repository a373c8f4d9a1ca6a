"""Compare the workspace formula with MLX's own peak on the CPU backend; see docs/accuracy.md.

Run from the checkout with mlx and mlx-lm installed: ``python -m benchmarks.workspace_accuracy``.
Every case of tests/arch/cases is built with random weights and run by mlx-lm's generate_step in a
separate process. ``--tokens`` is the prompt, prefilled in chunks of half of it.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.child import output_of
from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.weights.derived import QuantizationPlan, derive
from memfit.estimators.workspace.peak import peak

CASES = Path(__file__).parents[1] / "tests" / "arch" / "cases"
BITS = 4
GROUP = 32
TIMEOUT_SECONDS = 120
HOST = Device("this host", "cpu", 0, 0, None, "flag")


@dataclass(frozen=True, slots=True)
class Row:
    """Workspace in bytes of one case, as predicted and as measured."""

    name: str
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        """The predicted workspace divided by the measured one."""
        return self.predicted / self.measured


def main() -> None:
    """Print one row per case, and the distribution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=513)
    parser.add_argument("--quantized", action="store_true", help="4-bit weights")
    parser.add_argument("--only", default="")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workload = Workload(
        prompt_tokens=arguments.tokens, max_tokens=2, prefill_step=arguments.tokens // 2
    )
    if arguments.measure:
        print(measure(arguments.measure, workload, quantized=arguments.quantized))
        return
    rows = []
    for path in sorted(CASES.glob("*.json")):
        if arguments.only in path.stem:
            row = compare(path, workload, sys.argv[1:], quantized=arguments.quantized)
            if row:
                rows.append(row)
                print(f"| {row.name} | {row.measured:,} | {row.predicted:,} | {row.ratio:.2f} |")
    summarise(rows)


def summarise(rows: list[Row]) -> None:
    """Print the quartiles of predicted divided by measured."""
    ratios = sorted(row.ratio for row in rows)
    within = sum(0.8 <= ratio <= 1.25 for ratio in ratios)
    count = len(ratios)
    print(
        f"{count} cases: median {median(ratios):.2f}, quartiles {ratios[count // 4]:.2f} and"
        f" {ratios[3 * count // 4]:.2f}, range {ratios[0]:.2f} to {ratios[-1]:.2f};"
        f" {within} within -20 % and +25 %"
    )


def compare(path: Path, workload: Workload, options: list[str], *, quantized: bool) -> Row | None:
    """Return the row of a case, None where mlx-lm cannot run it here."""
    asked = (*options, "--measure", str(path))
    measured = output_of(path.stem, "workspace_accuracy", *asked, seconds=TIMEOUT_SECONDS)
    if measured is None:
        return None
    return Row(path.stem, predict(path, workload, quantized=quantized), int(measured))


def predict(path: Path, workload: Workload, *, quantized: bool) -> int:
    """Return the formula's workspace: the peak minus weights, caches and states at the end."""
    model = build_model(_config(path), path.name)
    plan = QuantizationPlan(Quantization(BITS, GROUP), converting=True) if quantized else None
    weights = derive(model, plan).loaded_bytes
    return peak(model, workload, resident_bytes=weights, plan=plan, device=HOST).workspace_bytes


def measure(path: Path, workload: Workload, *, quantized: bool) -> int:
    """Return MLX's peak over a generation minus weights, caches and states at the end."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    from tests.oracle import Oracle, cache_bytes

    oracle = Oracle(_config(path))
    if quantized:
        oracle.quantize(BITS, GROUP)
    mx.eval(oracle.model.parameters())
    mx.synchronize()
    mx.clear_cache()
    caches = make_prompt_cache(oracle.model)
    prompt = mx.arange(workload.prompt_tokens) % 17
    mx.eval(prompt)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in generate_step(
        prompt,
        oracle.model,
        max_tokens=workload.max_tokens,
        prompt_cache=caches,
        prefill_step_size=workload.prefill_step,
    ):
        pass
    return int(mx.get_peak_memory() - before - sum(cache_bytes(caches)))


def _config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    return config


if __name__ == "__main__":
    main()
