"""Compare what published runs of mlx-vlm kept at their end with memfit's, by trace.

Run from the checkout: ``python -m benchmarks.published_held DIRECTORY``. The directory has a file
``vlm_peaks.jsonl`` with a row per run, of which those with ``cache_gb`` are compared; the configs
of the models are in tests/published/images, the classes those of the installed mlx-vlm.

mlx-vlm clears once at the very end of `stream_generate` (generate/dispatch.py), while the caches,
the inputs and one further step are still alive. What MLX keeps afterwards is what was in use then,
less what the model and the caller keep.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.published_images import (
    CONFIGS,
    DEVICES,
    _model,
    add_development_rules,
    development_version,
)
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.workload import Workload
from memfit.estimators.images.processor import image_plan
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.trace.graph_format import Array, Call
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.layouts import Allocation
from memfit.estimators.trace.vision_peak import _VisionReplay

STEP = 256


class Alive(NamedTuple):
    """A buffer in use when a run has ended, and the array that it holds."""

    nbytes: int
    operation: str
    array: Array
    arrays: tuple[int, ...]
    is_under_way: bool
    """Whether an operation that has not ended reads it too."""


class _End(_VisionReplay):
    """A run up to its last evaluation, for which nothing waits."""

    def end(self) -> tuple[int, list[Alive]]:
        """Return the bytes in use, and the buffers of arrays."""
        for _ in self.peaks():
            pass
        buffers: dict[int, tuple[Allocation, list[int]]] = {}
        for place, view in enumerate(self._views):
            buffer = view.buffer
            if buffer and buffer.nbytes and buffer.died is None and buffer.operation != "weights":
                buffers.setdefault(id(buffer), (buffer, []))[1].append(place)
        alive = [
            Alive(
                buffer.nbytes,
                buffer.operation,
                self._arrays[places[0]],
                tuple(places),
                buffer.references > len(places),
            )
            for buffer, places in buffers.values()
        ]
        return self._memory.active, alive


def kept(row: dict[str, Any]) -> int:
    """Return what a run keeps when it has ended, in bytes."""
    width, height = row["image_wh"]
    checkpoint, model = _model(CONFIGS / f"{row['model'].replace('/', '--')}.json")
    device, version = find_device(DEVICES[row["machine"]]), development_version(row["mlx"])
    plan = image_plan(checkpoint, Images(images=(ImageSize(width, height),)))
    generated, most = row["generation_tokens"], row["generate_kwargs"]["max_tokens"]
    prompt = row["prompt_tokens"] + plan.added
    tokens = prompt + max(0, generated - 2)
    run = model.record(
        plan,
        Workload(prompt_tokens=tokens, prefill_step=row["generate_kwargs"]["prefill_step_size"]),
        TraceTarget(backend="metal", nax=has_nax(device), versions=MlxVersions(version)),
    )
    active, alive = _End(run, device, version).end()
    if run.cuts[-1].kind == "clear_cache" or "diffusion" in row["model"].lower():
        return sum(each.nbytes for each in alive if each.array.role == "tokens")
    of_weights = _made_of_weights(run.call)
    parts: defaultdict[str, int] = defaultdict(int)
    for each in alive:
        kind = _kind(each, tokens, of_weights)
        # The result holds the log-probabilities of one token, of which a step under way has more.
        parts[kind] = each.nbytes + (0 if kind == "log-probabilities" else parts[kind])
        if kind == "caches":
            parts["ring"] += _not_yet_full(each, prompt, generated, tokens)
        if not each.is_under_way and (
            kind == "embeddings" or (kind == "rest" and each.nbytes > 1 << 20)
        ):
            parts["locals"] += each.nbytes
    # The locals of the loop are gone where it has ended by its own count.
    longer = parts["embeddings"] - parts["embeddings"] * prompt // tokens
    less = parts["locals"] if generated >= most else longer
    return active - parts["model"] - parts["log-probabilities"] + parts["ring"] - less


def _made_of_weights(call: Call) -> set[int]:
    """Return the arrays that are made of weights alone, which a class may keep."""
    given, made = set[int](), set[int]()
    for place, array in enumerate(call.arrays):
        if array.role == "weight":
            made.add(place)
        elif array.role in ("tokens", "cache") or (
            array.role == "constant" and array.shape and max(array.shape) > 1
        ):
            given.add(place)
    for node in call.nodes:
        if not given.isdisjoint(node.inputs):
            given.update(node.outputs)
        elif not made.isdisjoint(node.inputs):
            made.update(node.outputs)
    return made


def _kind(each: Alive, tokens: int, of_weights: set[int]) -> str:
    shape = each.array.shape
    if each.array.role == "tokens":
        return "inputs"
    if of_weights.issuperset(each.arrays) and each.nbytes > 1 << 16:
        return "model"
    if each.operation == "Subtract" and len(shape) == 1:
        return "log-probabilities"
    is_long = len(shape) in (3, 4) and shape[1] > 16 and each.array.role == "computed"
    near = 0 if len(shape) == 4 else tokens // 2 + 7
    if is_long and abs(shape[1] - tokens) <= near:
        return "embeddings"
    if len(shape) == 4:
        return "caches"
    # A table of positions.
    is_table = len(shape) == 2 and each.array.dtype == "F32" and shape[0] % 1024 == 0
    return "model" if is_table else "rest"


def _not_yet_full(each: Alive, prompt: int, generated: int, tokens: int) -> int:
    """Return what a ring that is not full has more: the prompt, then steps of 256 tokens."""
    room = each.array.shape[2]
    if room % STEP == 0 or room <= tokens - 8:
        return 0
    true = min(room, prompt + STEP * max(1, -(-(generated - 1) // STEP)))
    return each.nbytes // room * (true - room)


def errors(directory: Path, model: str = "") -> Iterator[tuple[str, float]]:
    """Yield the model of each row, and the kept bytes over the published ones, less one."""
    add_development_rules()
    for line in (directory / "vlm_peaks.jsonl").read_text().splitlines():
        row = json.loads(line)
        path = CONFIGS / f"{row['model'].replace('/', '--')}.json"
        if row.get("cache_gb") is not None and model in row["model"] and path.exists():
            yield row["model"], kept(row) / round(row["cache_gb"] * 1e9) - 1


def main() -> None:
    """Print a row for each run, and how many are how near."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="", help="rows of models with this in their name")
    arguments = parser.parse_args()
    found = []
    for name, error in errors(arguments.directory, arguments.model):
        found.append(abs(error))
        print(f"{name} {100 * error:+.2f} %", flush=True)
    found.sort()
    ninth = found[len(found) * 9 // 10]
    print(f"{len(found)} rows: median {100 * median(found):.2f} %, 90 % within {100 * ninth:.2f} %")


if __name__ == "__main__":
    main()
