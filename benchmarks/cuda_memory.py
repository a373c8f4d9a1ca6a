"""Measure MLX's allocator during runs of mlx-lm on a GPU, and compare traces with the figures.

``python benchmarks/cuda_memory.py measure ROWS.jsonl`` needs MLX, mlx-lm and PyYAML alone, and a
folder ``sample_configs`` to run in; each model is built with random weights in a process of its
own and run three times. ``python -m benchmarks.cuda_memory compare ROWS.jsonl`` traces these runs
for that device. docs/accuracy.md sums up the result.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

RUNS = 3
GROUP = 64
# Model (a sample, or a case of tests/arch/cases), bits (16: not quantised), prompt, step, generated
# and sequences of the batch generator (0: generate_step).
CASES: tuple[tuple[str, int, int, int, int, int], ...] = (
    ("qwen3-0.6b", 16, 700, 256, 300, 0),
    ("qwen3-0.6b", 4, 3000, 512, 300, 0),
    ("llama-3.2-3b", 16, 5000, 2048, 300, 0),
    ("llama-3.2-3b", 4, 5000, 2048, 300, 0),
    ("llama-3.2-3b", 16, 1000, 2048, 200, 4),
    ("qwen3-4b-4bit", 16, 1025, 2048, 128, 0),
    ("qwen3-4b-4bit", 4, 20000, 2048, 300, 0),
    ("llama-3.1-8b", 16, 9000, 2048, 300, 0),
    ("gemma-3-4b", 16, 5000, 2048, 300, 0),
    ("gemma-3-4b", 4, 5000, 512, 300, 0),
    ("qwen3-30b-a3b-4bit", 4, 5000, 2048, 300, 0),
    ("llama-3.1-8b", 16, 20000, 2048, 300, 0),
    ("llama-3.1-8b", 4, 9000, 2048, 300, 0),
    ("gpt-oss-20b", 4, 5000, 2048, 300, 0),
    ("granite-4.0-h-tiny", 16, 5000, 2048, 300, 0),
    ("falcon-h1-7b", 4, 5000, 2048, 300, 0),
    ("lfm2-1.2b", 16, 5000, 2048, 300, 0),
    ("lfm2-1.2b", 16, 1000, 2048, 200, 4),
    ("qwen3.6-35b-a3b", 4, 5000, 2048, 300, 0),
    ("deepseek-v2-lite", 4, 5000, 2048, 300, 0),
)


def main() -> None:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("measure", "compare", "child"))
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument(
        "--small", action="store_true", help="four layers and a tenth of the tokens"
    )
    parser.add_argument("--seconds", type=float, default=480, help="start no case after this time")
    arguments = parser.parse_args()
    if arguments.task == "child":
        measure(json.loads(str(arguments.rows)))
    elif arguments.task == "compare":
        compare(arguments.rows, arguments.only)
    else:
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    """Run each case in a process, and write a row for each run."""
    started = time.perf_counter()
    with arguments.rows.open("w") as rows:
        for case in CASES:
            if arguments.only not in case[0]:
                continue
            if time.perf_counter() - started > arguments.seconds:
                print("left out:", case, flush=True)
                continue
            text = json.dumps([*case, arguments.small])
            command = [sys.executable, __file__, "child", text]
            try:
                child = subprocess.run(
                    command, capture_output=True, text=True, timeout=200, check=False
                )
                output, errors = child.stdout, child.stderr
            except subprocess.TimeoutExpired:
                output, errors = "", "timed out"
            lines = [line for line in output.splitlines() if line.startswith("{")]
            rows.write("".join(f"{line}\n" for line in lines))
            rows.flush()
            seconds = round(time.perf_counter() - started)
            print(case, len(lines), seconds, errors[-300:] if len(lines) < RUNS else "", flush=True)


def measure(case: list[Any]) -> None:
    """Print a row for each run of a case."""
    import mlx.core as mx

    name, bits, prompt, step, generated, sequences, is_small = case
    if is_small:
        prompt, step, generated = max(64, prompt // 10), max(32, step // 10), generated // 10
    model = _model(name, bits, is_small=is_small)
    mx.synchronize()
    mx.clear_cache()
    loaded = mx.get_active_memory()
    device = mx.device_info() if mx.cuda.is_available() else {"device_name": "CPU"}
    for run in range(RUNS):
        _settle()
        marks, parts = _run(model, prompt, step, generated, sequences)
        row = {
            "model": name,
            "bits": bits,
            "prompt": prompt,
            "step": step,
            "generated": generated,
            "sequences": sequences,
            "small": is_small,
            "run": run,
            "loaded": loaded,
            "weights": _weight_bytes(model),
            **parts,
            "marks": marks,
            "device": str(device.get("device_name")),
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
        }
        print(json.dumps(row), flush=True)


def _settle() -> None:
    import gc

    import mlx.core as mx

    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()


def _config(name: str) -> dict[str, Any]:
    case = Path("tests/arch/cases") / f"{name}.json"
    if case.exists():
        config: dict[str, Any] = json.loads(case.read_text())
        return config
    import yaml

    sample = Path("sample_configs") / f"{name}.yaml"
    config = _with_numbers(yaml.safe_load(sample.read_text())["config"])
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    return config


def _with_numbers(value: Any) -> Any:
    """Read 1e-05 as a number, which YAML 1.1 has as text."""
    if isinstance(value, dict):
        return {key: _with_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    is_number = isinstance(value, str) and re.fullmatch(r"-?[\d.]+e[-+]?\d+", value)
    return float(value) if is_number else value


def _smaller(config: dict[str, Any]) -> dict[str, Any]:
    """Four layers of a model, and a small vocabulary."""
    for part in (config, config.get("text_config", {})):
        layers = part.get("num_hidden_layers")
        for key, value in part.items():
            if isinstance(value, list) and len(value) == layers:
                part[key] = value[:4]
        if layers:
            part |= {"num_hidden_layers": 4, "vocab_size": 1024}
    return config


def _model(name: str, bits: int, *, is_small: bool) -> Any:
    """Build a model with random weights in bfloat16, layer by layer, packed where it has bits."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    config = _config(name)
    if is_small:
        config = _smaller(config)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits < 16:

        def packs(_: str, module: Any) -> bool:
            weight = getattr(module, "weight", None)
            if weight is None or not hasattr(module, "to_quantized"):
                return False
            return bool(weight.shape[-1] % GROUP == 0)

        predicate = getattr(model, "quant_predicate", None)

        def chosen(path: str, module: Any) -> Any:
            return packs(path, module) and (predicate is None or predicate(path, module))

        nn.quantize(model, GROUP, bits, class_predicate=chosen)
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
        mx.clear_cache()
    model.eval()
    return model


def _weight_bytes(model: Any) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _run(
    model: Any, prompt: int, step: int, generated: int, sequences: int
) -> tuple[list[list[Any]], dict[str, Any]]:
    """Return the memory at each clearing of the cache and at the end, and figures of both parts.

    Between two clearings active and kept bytes together only grow, so each mark has the most.
    """
    import mlx.core as mx

    marks: list[list[Any]] = []
    clear = mx.clear_cache

    def marked(label: str = "clear") -> None:
        seen = (mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())
        marks.append([label, round(time.perf_counter() - start, 4), *seen])

    def clear_cache() -> None:
        marked()
        clear()

    mx.clear_cache = clear_cache
    start = time.perf_counter()
    first: float | None = None
    parts: dict[str, Any] = {}
    try:
        tokens = _generate(model, prompt, step, generated, sequences)
        for _ in tokens:
            if first is None:
                first = time.perf_counter()
                parts = {"prefill_peak": mx.get_peak_memory(), "prefill_seconds": first - start}
                marked("first")
                mx.reset_peak_memory()
        end = time.perf_counter()
        marked("end")
        parts |= {"decode_peak": mx.get_peak_memory(), "decode_seconds": end - (first or start)}
        del tokens
        mx.synchronize()
        marked("after")
    finally:
        mx.clear_cache = clear
    return marks, parts


def _generate(
    model: Any, prompt: int, step: int, generated: int, sequences: int
) -> Iterator[object]:
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator, generate_step

    if not sequences:
        tokens = mx.arange(prompt) % 997
        mx.eval(tokens)
        yield from generate_step(tokens, model, max_tokens=generated, prefill_step_size=step)
        return
    generator = BatchGenerator(model, max_tokens=generated, prefill_step_size=step)
    each = [position % 997 for position in range(prompt)]
    generator.insert([each for _ in range(sequences)])
    while True:
        prompted, generating = generator.next()
        if generating:
            yield generating
        if not prompted and not generating:
            return


def compare(path: Path, only: str) -> None:
    """Print what each case has measured and what a trace for its device says, above the weights."""
    from memfit.estimators.base.dtypes import Quantization
    from memfit.estimators.base.workload import Workload
    from memfit.estimators.machine.devices import find_device
    from memfit.estimators.mlx.call_plan import CHUNKS
    from memfit.estimators.mlx.versions import MlxVersions
    from memfit.estimators.trace.kernel_stubs import TraceTarget
    from memfit.estimators.trace.peak import peak
    from memfit.estimators.trace.traced_model import TracedModel

    device = find_device("h100-80")
    target = TraceTarget(backend="cuda", versions=MlxVersions())
    for name, runs in _cases(path, only):
        row = runs[0]
        if row["sequences"]:
            continue
        packing = Quantization(row["bits"], GROUP) if row["bits"] < 16 else None
        model = TracedModel(_config(row["model"]), "cuda", quantize=packing)
        workload = Workload(
            prompt_tokens=row["prompt"], max_tokens=row["generated"], prefill_step=row["step"]
        )
        trace, shapes = model.record(workload, target)
        found = peak(trace, device)
        parts: dict[bool, int] = {}
        for part, nbytes in found.parts.items():
            parts[part in CHUNKS] = max(parts.get(part in CHUNKS, 0), nbytes)
        print(name, "weights", row["weights"] - shapes.weight_bytes)
        for label, is_prefill in (("prefill", True), ("decode", False)):
            measured = [run[f"{label}_peak"] - run["loaded"] for run in runs]
            predicted = parts[is_prefill] - found.weight_bytes
            ratios = [round(predicted / each, 3) for each in measured]
            print("  ", label, "measured", measured, "trace", predicted, ratios)
            held = [_held(run, is_prefill=is_prefill) for run in runs]
            kept = max(n for part, n in found.held.items() if (part in CHUNKS) == is_prefill)
            kept -= found.weight_bytes
            print("   held", held, "trace", kept, [round(kept / each, 3) for each in held])


def _held(run: dict[str, Any], *, is_prefill: bool) -> int:
    """Return the most in use and kept in one part of a run, above the weights."""
    labels = [mark[0] for mark in run["marks"]]
    first = labels.index("first") + 1
    marks = run["marks"][:first] if is_prefill else run["marks"][first:]
    return int(max(mark[2] + mark[3] for mark in marks) - run["loaded"])


def _cases(path: Path, only: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        keys = ("model", "bits", "prompt", "step", "generated", "sequences")
        cases.setdefault(" ".join(str(row[key]) for key in keys), []).append(row)
    yield from ((name, runs) for name, runs in cases.items() if only in name)


if __name__ == "__main__":
    main()
