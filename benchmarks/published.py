"""Compare peaks that other people measured and published with memfit's, by both methods.

Run from the checkout: ``python -m benchmarks.published [DIRECTORY]``. The directory has a file
``peaks.jsonl`` with a row per run and a folder ``configs``: tests/published by default, a part of
the rows of docs/accuracy.md. Each row is sized for its own device and by the rules of its versions.
``--kit FILE``, which can be repeated, adds the rows of what ``memfit tune --kit`` wrote.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from msgspec import convert, to_builtins

from benchmarks.accuracy import silu_apart
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.versions import MLX_LM_VERSION, MLX_VERSION, MlxVersions, parse_version
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.kit.comparison import read_kit
from memfit.probes.kit.models import GROUP_SIZE, MODELS, scale_of
from memfit.probes.kit.result import Kit

ROWS = Path(__file__).parents[1] / "tests" / "published"
METHODS: tuple[MethodSetting, ...] = ("trace", "formula")
WORST = 3
_DEVICES = {"H100": "h100-80", "B200": "b200", "M4 Pro 64": "m4-pro-64"}
_WORKLOAD = (
    "prompt_tokens",
    "max_tokens",
    "prefill_step",
    "batch",
    "kv_bits",
    "quantized_kv_start",
)
# mlx_lm itself, a version with known rules, the checkpoint as published.
CLEAN = "clean"


class Answer(NamedTuple):
    """A published run and the predicted peak, None where memfit rejects it."""

    name: str
    is_clean: bool
    measured: float
    predicted: int | None

    @property
    def error(self) -> float:
        """Predicted minus measured, as a share of the measured."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


def main() -> None:
    """Print the errors of both methods over all rows and over the clean ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=ROWS)
    parser.add_argument("--verbose", action="store_true", help="print a table of all rows")
    parser.add_argument("--kit", type=Path, action="append", default=[], help="rows of a kit")
    arguments = parser.parse_args()
    rows = read_rows(arguments.directory)
    with TemporaryDirectory() as folder:
        for file in arguments.kit:
            rows += kit_rows(read_kit(file), Path(folder))
        by_method = {m: list(compare(rows, m, arguments.directory / "configs")) for m in METHODS}
    print("| method | rows | | median | 90 % within | all within | worst |")
    print("|---|---|--:|--:|--:|--:|---|")
    for method, answers in by_method.items():
        print(summary(method, "clean", [each for each in answers if each.is_clean]))
        print(summary(method, "all", answers))
    if arguments.verbose:
        print_rows(rows, by_method)


def print_rows(rows: list[dict[str, Any]], by_method: dict[MethodSetting, list[Answer]]) -> None:
    """Print a table of all rows, as docs/published-peaks.md has it."""
    print(f"\n| run | kind | published | {' | '.join(by_method)} |")
    print("|---|---|--:|" + "--:|" * len(by_method))
    for row, *answers in zip(rows, *by_method.values(), strict=True):
        errors = (f"{each.error:+.2%}" if each.predicted else "-" for each in answers)
        print(f"| {answers[0].name} | {row['kind']} | {row['peak_gb']} GB | {' | '.join(errors)} |")


def read_rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "peaks.jsonl").read_text().splitlines()]


def kit_rows(kit: Kit, folder: Path) -> list[dict[str, Any]]:
    """Return the peaks of a kit as published rows; the configs of its models go to a folder."""
    workloads = scale_of(kit.device.backend).workloads()
    rows = []
    for check in kit.checks:
        workload = workloads.get(check.setting)
        if check.figure != "peak" or check.measured is None or not workload:
            continue
        model = MODELS[check.subject]
        path = folder / f"{check.subject}.json"
        path.write_text(json.dumps(model.config))
        packing = {"bits": model.bits, "group_size": GROUP_SIZE} if model.bits else {}
        row = {"model": f"{check.subject} of a kit", "config": str(path), "kind": CLEAN, **packing}
        row |= {"mlx": kit.mlx_version, "mlx_rules": kit.mlx_version, "mlx_lm": kit.mlx_lm_version}
        row |= {"machine": kit.device.name, "kit_device": to_builtins(kit.device)}
        rows.append({**row, **to_builtins(workload), "peak_gb": check.measured / 1e9})
    return rows


def compare(
    rows: Iterable[dict[str, Any]], method: MethodSetting, configs: Path
) -> Iterator[Answer]:
    for row in rows:
        weights = f"{row.get('bits') or 'own'} bits"
        mlx = row["mlx"].partition(" (")[0]
        name = f"{row['model']}, {weights}, {row['prompt_tokens']} tokens, MLX {mlx}"
        try:
            predicted = predict(row, method, configs)
        except MemfitError:
            predicted = None
        yield Answer(name, row["kind"] == CLEAN, row["peak_gb"] * 1e9, predicted)


def predict(row: dict[str, Any], method: MethodSetting, configs: Path) -> int:
    settings = {key: row[key] for key in _WORKLOAD if row.get(key) is not None}
    device = device_of(row)
    path, versions = configs / row["config"], versions_of(row)
    # The trace runs the installed class.
    is_apart = method == "trace" and versions.has("product_after_silu")
    with silu_apart() if is_apart else nullcontext():
        sized = _sized(path, packing_of(row), device, method, versions)
        return sized.figures_for(Workload(**settings)).moment.nbytes


def device_of(row: dict[str, Any]) -> Device:
    """Return the machine of a row: a kit describes its own."""
    if kit_device := row.get("kit_device"):
        return convert(kit_device, Device)
    return find_device(row.get("device") or _DEVICES.get(row["machine"], row["machine"]))


def versions_of(row: dict[str, Any]) -> MlxVersions:
    """Return the versions with the rules of a row; those of mlx-lm are not always known."""
    known = re.findall(r"\d+\.\d+(?:\.\d+)?", row.get("mlx_lm") or "")
    mlx_lm = parse_version(known[-1]) if known else MLX_LM_VERSION
    mlx = parse_version(row["mlx_rules"]) if "mlx_rules" in row else MLX_VERSION
    return MlxVersions(mlx, mlx_lm)


def packing_of(row: dict[str, Any]) -> Quantization | None:
    """Return how a row's weights are packed, None at 16 bits."""
    if "quantization" in row or "nvfp4" in row["model"]:
        return Quantization(4, 16, "nvfp4")
    return Quantization(row["bits"], row["group_size"]) if row.get("bits", 16) < 16 else None


@cache
def _sized(
    path: Path,
    packing: Quantization | None,
    device: Device,
    method: MethodSetting,
    versions: MlxVersions,
) -> SizedModel:
    config = json.loads(path.read_text())
    checkpoint = Checkpoint(id=path.stem, source="config", config=config, config_name=path.name)
    quantize = None if "quantization" in config else packing
    return size(checkpoint, device=device, quantize=quantize, method=method, versions=versions)


def summary(method: str, rows: str, answers: list[Answer]) -> str:
    """Return a row of the table: how far predictions are from measurements."""
    known = sorted((each for each in answers if each.predicted), key=lambda each: abs(each.error))
    errors = [abs(each.error) for each in known]
    worst = "; ".join(f"{each.name} {each.error:+.1%}" for each in known[: -WORST - 1 : -1])
    return (
        f"| {method} | {rows} | {len(known)} of {len(answers)} | {median(errors):.2%}"
        f" | {errors[len(errors) * 9 // 10]:.2%} | {errors[-1]:.1%} | {worst} |"
    )


if __name__ == "__main__":
    main()
