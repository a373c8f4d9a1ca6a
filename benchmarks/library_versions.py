"""Follows models through the releases of mlx-lm or mlx-vlm: what each changes in bytes.

    python -m benchmarks.library_versions mlx-lm llama-3.2-3b 0.30.2 0.30.4 0.31.1 0.31.2
    python -m benchmarks.library_versions mlx-vlm qwen3-vl-4b --image 1024x768 0.6.7 0.7.10

Words that are versions are compared in their order, each with the one before.
"""

import argparse
from itertools import pairwise

from memfit.estimators.base.progress import NULL_PROGRESS
from memfit.estimators.results.library_diff import LibraryDiff
from memfit.library_diff import library_diff


def main() -> None:
    """Print the changes of each release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=("mlx-lm", "mlx-vlm"))
    parser.add_argument("words", nargs="+", help="models, then versions")
    parser.add_argument("--image")
    given = parser.parse_args()
    versions = [word for word in given.words if word[0].isdigit()]
    models = [word for word in given.words if not word[0].isdigit()]
    for old, new in pairwise(versions):
        result = library_diff(
            given.package,
            (old, new),
            models,
            (4096, 32768),
            "m4-max-64",
            image=given.image,
            progress=NULL_PROGRESS,
        )
        print(f"{given.package} {new}: {_text(result)}", flush=True)


def _text(result: LibraryDiff) -> str:
    changes = [
        f"{model.model} at {peak.prompt_tokens} {(peak.new_bytes or 0) - (peak.old_bytes or 0):+}"
        for model in result.models
        for peak in model.peaks
        if None not in (peak.old_bytes, peak.new_bytes) and peak.old_bytes != peak.new_bytes
    ]
    new = [
        f"{model.model} first traced"
        for model in result.models
        if model.old_message is not None and model.new_message is None
    ]
    loops = [f"calls of a prompt of {loop.prompt_tokens}" for loop in result.loops]
    return "; ".join([*changes, *new, *loops]) or "no change"


if __name__ == "__main__":
    main()
