"""Compare published peaks of prompts with images with memfit's, by trace of mlx-vlm's classes.

Run from the checkout: ``python -m benchmarks.published_images DIRECTORY`` with ``--page
docs/published-image-peaks.md`` writes the table of that page: all rows, each with the class of the
mlx-vlm that was measured, which is downloaded. With ``--version`` or ``--model`` it prints rows,
with the classes of the installed mlx-vlm. The directory has a file ``vlm_peaks.jsonl`` with a row
per run; the configs of the models are in tests/published/images, with their sources.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.processor import image_plan
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.data.kernels import KERNELS
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.versions import MlxVersions, Version, parse_version
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import RunPeak
from memfit.estimators.trace.vision_model import TracedVisionModel
from memfit.estimators.trace.vision_peak import VisionPart, vision_peak

CONFIGS = Path(__file__).parents[1] / "tests" / "published" / "images"
DTYPES = {"bfloat16": "BF16", "float16": "F16"}
DEVICES = {"Apple M5 Max 128.0 GB": "m5-max-128"}
# Versions that cannot be installed, and the next one.
INSTALLED = {"0.6.11": "0.6.12"}
NOT_RUN = {"Step-3.7-Flash-oQ2e": "the bits of its layers are not known"}


class Files(NamedTuple):
    """The files of a sample's processor."""

    contents: dict[str, Any]

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        return name in self.contents

    def read(self, name: str, *, limit: int) -> bytes:
        """Return a file; ``limit`` is that of files that users have."""
        return json.dumps(self.contents[name]).encode()[:limit]


class Compared(NamedTuple):
    """A published run and its traced peak, or why there is none."""

    row: dict[str, Any]
    traced: RunPeak[VisionPart] | None
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Traced over published; 0 without a trace."""
        return self.traced.nbytes / (self.row["peak"] * 1e9) if self.traced else 0.0


def main() -> None:
    """Print a row for each run, and how many are how near; or write the page of all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--version", help="rows of this version of mlx-vlm alone")
    parser.add_argument("--model", default="", help="rows of models with this in their name")
    parser.add_argument("--page", type=Path, help="write all rows to this file")
    arguments = parser.parse_args()
    lines = (arguments.directory / "vlm_peaks.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if arguments.model in row["model"]]
    if arguments.page:
        versions = dict.fromkeys(map(_version, rows))
        table = [line for each in versions for line in _run(arguments, each)]
        intro, titles, _ = arguments.page.read_text().partition("|--:|---|\n")
        arguments.page.write_text("\n".join([intro + titles.rstrip(), *table, ""]))
        print(totals(table))
        return
    add_development_rules()
    table = []
    for row in rows:
        if arguments.version in (None, _version(row)):
            table.append(line(compared(row)))
            print(table[-1], flush=True)
    print(f"\n{totals(table)}")


def add_development_rules() -> None:
    """Add what MLX fused between 0.32.0 and 0.32.1: width 96 (#3943) before width 72 (#4330)."""
    rows = KERNELS["metal"]
    earlier = next(row for row in rows if row["since"] == (0, 32, 0))
    full, *others = earlier["rules"]
    fused = {**full, "widths": tuple((width, width) for width in (64, 80, 96, 128))}
    between = {**earlier, "since": (0, 32, 0, 20260806), "rules": (fused, *others)}
    rows.insert(rows.index(earlier), between)


def _version(row: dict[str, Any]) -> str:
    return str(row.get("mlx_vlm", "unknown"))


def _run(arguments: argparse.Namespace, version: str) -> list[str]:
    """Return the rows of a version of mlx-vlm, with the classes of that version."""
    rows = (str(arguments.directory), "--model", arguments.model, "--version", version)
    with TemporaryDirectory() as folder:
        if version != "unknown":
            wanted = f"mlx-vlm=={INSTALLED.get(version, version)}"
            install = ("pip", "install", "--quiet", "--no-deps", "--target", folder, wanted)
            subprocess.run([sys.executable, "-m", *install], check=True)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.published_images", *rows],
            env={**os.environ, "PYTHONPATH": folder},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return [line for line in done.stdout.splitlines() if line.startswith("| ")]


def totals(table: Sequence[str]) -> str:
    """Return how many rows of a table were traced, and how near they are."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    models = {row[0] for row in cells if row[6] != "-"}
    ratios = [float(row[6]) for row in cells if row[6] != "-"]
    if not ratios:
        return f"None of {len(cells)} rows was traced."
    one, five = (sum(abs(ratio - 1) <= error for ratio in ratios) for error in (0.01, 0.05))
    return (
        f"{len(ratios)} of {len(cells)} rows, {len(models)} models: median"
        f" {median(ratios):.3f}, {one} within 1 %, {five} ({five * 100 // len(ratios)} %) within"
        f" 5 %, from {min(ratios):.3f} to {max(ratios):.3f}"
    )


def development_version(text: str) -> Version:
    """Return the release before a development build, and the day of the build.

    >>> development_version("0.32.1.dev20260808+6539d1807")
    (0, 32, 0, 20260808)
    """
    release, _, build = text.partition(".dev")
    *numbers, last = parse_version(release)
    return (*numbers, last - 1, int(build.partition("+")[0]))


def line(each: Compared) -> str:
    """Return the row of a table."""
    row, peak = each.row, each.traced
    image = "x".join(map(str, row.get("image_wh", ())))
    head = f"| {row['model'].rpartition('/')[2]} | {image} | {row.get('prompt_tokens', '')}"
    head += f" | {row.get('mlx_vlm', '')} | {row['peak']:.3f}"
    if peak is None:
        return f"{head} | - | - | {each.reason} |"
    return f"{head} | {peak.nbytes / 1e9:.3f} | {each.ratio:.4f} | {peak.top.part} |"


def compared(row: dict[str, Any]) -> Compared:
    """Trace a row on its own device, by the rules of its version of MLX."""
    path = CONFIGS / f"{row['model'].replace('/', '--')}.json"
    if "image_wh" not in row:
        return Compared(row, None, "no size of an image")
    if not path.exists():
        return Compared(row, None, NOT_RUN.get(row["model"].rpartition("/")[2], "no config"))
    width, height = row["image_wh"]
    step = row["generate_kwargs"]["prefill_step_size"]
    try:
        peak = _peak(path, width, height, row["prompt_tokens"], step, row["machine"], row["mlx"])
        return Compared(row, peak)
    except MemfitError as error:
        return Compared(row, None, str(error))


@cache
def _peak(
    path: Path, width: int, height: int, tokens: int, step: int, machine: str, mlx: str
) -> RunPeak[VisionPart]:
    device, version = find_device(DEVICES[machine]), development_version(mlx)
    checkpoint, model = _model(path)
    plan = image_plan(checkpoint, Images(images=(ImageSize(width, height),)))
    target = TraceTarget(backend="metal", nax=has_nax(device), versions=MlxVersions(version))
    workload = Workload(prompt_tokens=tokens + plan.added, prefill_step=step)
    run = model.record(plan, workload, target)
    return vision_peak(run, model.weights, device, version)


@cache
def _model(path: Path) -> tuple[Checkpoint, TracedVisionModel]:
    published = json.loads(path.read_text())
    checkpoint = Checkpoint(
        id=published["model"],
        source="local",
        config=published["config"],
        config_name=path.name,
        others=Files(published.get("files", {})),
    )
    dtype = DTYPES[checkpoint.config.get("torch_dtype", "bfloat16")]
    return checkpoint, TracedVisionModel(
        checkpoint.config, "metal", name=checkpoint.id, dtype=dtype
    )


if __name__ == "__main__":
    main()
