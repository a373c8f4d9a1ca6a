"""Compare the traced peaks of small models with images with those of mlx-vlm itself on the CPU.

Run from the checkout: ``python -m benchmarks.image_accuracy``. The models are those of
tests/trace/vision_cases.py, with random weights; on an idle machine, because a run frees arrays
earlier where the CPU is quicker than Python.
"""

from tests.trace.test_vision import traced
from tests.trace.vision_cases import CASES, WIDE
from tests.trace.vision_runs import measured


def main() -> None:
    """Print a row for each model."""
    print("| model | measured MB | traced MB | ratio | in |")
    print("|---|--:|--:|--:|---|")
    for case in (*CASES, *WIDE):
        peak, found = traced(case), measured(case)
        ratio = peak.nbytes / found
        row = f"| {case.name} | {found / 1e6:.2f} | {peak.nbytes / 1e6:.2f} | {ratio:.4f}"
        print(f"{row} | {peak.top.part} |", flush=True)


if __name__ == "__main__":
    main()
