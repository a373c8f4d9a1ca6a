"""Compare what other tools say of published runs with the measured peaks, and with memfit.

Run from the checkout, each peer installed from the package index into an environment of its own:
``python -m benchmarks.peers DIRECTORY --hf-mem PYTHON --whichllm PYTHON --llmfit PROGRAM
--gguf-parser PROGRAM``. The rows are those of `benchmarks.published`. Nothing asks the network:
hf-mem and whichllm are called as libraries with the checkpoint's own bytes, llmfit looks in the
list of models that it ships, gguf-parser gets the header of a GGUF file with these bytes.
The tools answer about weights and a cache for any engine, or llama.cpp's; the runs are of MLX.
"""

import argparse
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.gguf_header import write_header
from benchmarks.published import CLEAN, ROWS, packing_of, predict, read_rows
from memfit.estimators.base.errors import MemfitError
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.devices import find_device
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel

# Each runs in the peer's environment: questions on standard input, an answer for each on output.
HF_MEM = """
import json, sys
from importlib.metadata import version
from hf_mem.safetensors import *
answers = []
for each in json.load(sys.stdin):
    raw = {"model.safetensors": {"weights": {"dtype": "U8", "shape": [each["weights_bytes"]]}}}
    found = parse_safetensors_metadata(raw)
    text = {**each["config"], **each["config"].get("text_config", {})}
    text.setdefault("dtype", "bfloat16")
    text.pop("quantization_config", None)
    try:
        dtype = resolve_kv_cache_dtype(text, "auto", found, each["name"])
        kv = compute_safetensors_kv_cache_size(text, dtype, each["tokens"], each["batch"])
        answers.append(found.bytes_count + kv)
    except (KeyError, RuntimeError, TypeError):
        answers.append(None)
print(json.dumps([version("hf-mem"), answers]))
"""
WHICHLLM = """
import json, sys
from importlib.metadata import version
from whichllm.engine.vram import estimate_vram
from whichllm.models.types import GGUFVariant, ModelInfo
answers = []
for each in json.load(sys.stdin):
    model = ModelInfo(
        id=each["name"], family_id="", name=each["name"], parameter_count=each["parameters"],
        parameter_count_active=each["active"], is_moe=each["is_moe"],
    )
    variant = GGUFVariant("model", "", each["weights_bytes"])
    answers.append(estimate_vram(model, variant, each["tokens"]))
print(json.dumps([version("whichllm"), answers]))
"""
# How llmfit's list calls the models of the rows.
_LLMFIT = {
    "gemma-3-27b": "google/gemma-3-27b-it",
    "gemma-4-26b-a4b": "google/gemma-4-26B-A4B-it",
    "gemma-4-31b": "google/gemma-4-31B-it",
    "gemma-4-e2b": "google/gemma-4-E2B-it",
    "gemma-4-e4b": "google/gemma-4-E4B-it",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "granite-4.0-h-small": "ibm-granite/granite-4.0-h-small",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "mistral-7b-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
    "phi-4-mini": "microsoft/Phi-4-mini-instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.6-27b": "Qwen/Qwen3.6-27B",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
}
_LLMFIT_BITS = {4: "mlx-4bit", 8: "mlx-8bit", 16: "bf16"}

Answers = tuple[str, list[int | None]]
"""A tool with its version, and what it says of each row."""


class Peer(NamedTuple):
    """A tool, and how it is asked."""

    name: str
    ask: Callable[[str, list[dict[str, Any]]], Answers]


def main() -> None:
    """Print how far each tool is from the measured peaks, over clean rows and over all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=ROWS)
    for peer in PEERS:
        parser.add_argument(f"--{peer.name}", metavar="FILE", help="its Python, or its program")
    arguments = parser.parse_args()
    rows = read_rows(arguments.directory)
    configs = arguments.directory / "configs"
    tools: list[Answers] = [("memfit, formula", [_of_memfit(row, configs) for row in rows])]
    questions = [_question(row, configs) for row in rows]
    for peer in PEERS:
        if program := getattr(arguments, peer.name.replace("-", "_")):
            tools.append(peer.ask(program, questions))
    print("| tool | rows | answered | median | 90 % within | too low | worst |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name, answers in tools:
        for kind in (CLEAN, "all"):
            print(_summary(name, kind, zip(rows, answers, strict=True)))


def _of_memfit(row: dict[str, Any], configs: Path) -> int | None:
    try:
        return predict(row, "formula", configs)
    except MemfitError:
        return None


def _question(row: dict[str, Any], configs: Path) -> dict[str, Any]:
    """A row as the tools are asked: the checkpoint's own bytes, and the tokens at its end."""
    path = configs / row["config"]
    config = json.loads(path.read_text())
    sized = _sized(row, path, config)
    text = {**config, **config.get("text_config", {})}
    experts = (
        text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")
    )
    return {
        "name": path.stem,
        "config": config,
        "weights_bytes": sized.resident_bytes,
        "parameters": sized.footprint.parameters,
        "active": _active(row["model"]),
        "is_moe": bool(experts),
        "tokens": row["prompt_tokens"] + row["max_tokens"],
        "batch": row.get("batch") or 1,
        "bits": row.get("bits"),
    }


def _sized(row: dict[str, Any], path: Path, config: dict[str, Any]) -> SizedModel:
    checkpoint = Checkpoint(id=path.stem, source="config", config=config, config_name=path.name)
    quantize = None if "quantization" in config else packing_of(row)
    return size(checkpoint, device=find_device("m4-max-64"), quantize=quantize)


def _active(name: str) -> int | None:
    """Active parameters by the name of a mixture of experts: 3e9 of 35B-A3B."""
    found = re.search(r"-a(\d+)b", name, re.IGNORECASE)
    return int(found[1]) * 10**9 if found else None


def _library(script: str, name: str) -> Callable[[str, list[dict[str, Any]]], Answers]:
    def ask(python: str, questions: list[dict[str, Any]]) -> Answers:
        done = subprocess.run(
            [python, "-c", script],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            check=True,
        )
        version, answers = json.loads(done.stdout)
        return f"{name} {version}", answers

    return ask


def _ask_llmfit(program: str, questions: list[dict[str, Any]]) -> Answers:
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return version.stdout.strip(), [_of_llmfit(program, each) for each in questions]


def _of_llmfit(program: str, question: dict[str, Any]) -> int | None:
    name, quant = _LLMFIT.get(question["name"]), _LLMFIT_BITS.get(question["bits"])
    if name is None or quant is None:
        return None
    command = [program, "plan", name, "--context", str(question["tokens"]), "--quant", quant]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return int(json.loads(done.stdout)["minimum"]["vram_gb"] * 1e9)


def _ask_gguf_parser(program: str, questions: list[dict[str, Any]]) -> Answers:
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        answers: list[int | None] = [_of_gguf_parser(program, file, each) for each in questions]
    return version.stdout.strip().replace(" version v", " "), answers


def _of_gguf_parser(program: str, file: Path, question: dict[str, Any]) -> int:
    """What it says of one memory for all (UMA), as on a Mac, with weights that are not mapped."""
    write_header(
        file,
        question["config"],
        weights_bytes=question["weights_bytes"],
        bits=question["bits"],
        is_moe=question["is_moe"],
    )
    sequences = question["batch"]
    tokens = question["tokens"] * sequences  # llama.cpp divides them
    command = [program, "--path", str(file), "--ctx-size", str(tokens), "--no-mmap"]
    command += ["--parallel-size", str(sequences), "--estimate", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (item,) = json.loads(done.stdout)["estimate"]["items"]
    return int(item["ram"]["uma"] + sum(each["uma"] for each in item["vrams"]))


PEERS = (
    Peer("gguf-parser", _ask_gguf_parser),
    Peer("hf-mem", _library(HF_MEM, "hf-mem")),
    Peer("llmfit", _ask_llmfit),
    Peer("whichllm", _library(WHICHLLM, "whichllm")),
)


def _summary(name: str, kind: str, found: Iterable[tuple[dict[str, Any], int | None]]) -> str:
    chosen = [(row, answer) for row, answer in found if kind in ("all", row["kind"])]
    errors = sorted(_errors(chosen), key=abs)
    if not errors:
        return f"| {name} | {kind} | 0 of {len(chosen)} | - | - | - | - |"
    low = sum(error < 0 for error in errors)
    return (
        f"| {name} | {kind} | {len(errors)} of {len(chosen)} | {abs(median_of(errors)):.1%}"
        f" | {abs(errors[len(errors) * 9 // 10]):.1%} | {low} | {errors[-1]:+.0%} |"
    )


def median_of(errors: Iterable[float]) -> float:
    return median(abs(error) for error in errors)


def _errors(rows: Iterable[tuple[dict[str, Any], int | None]]) -> Iterator[float]:
    for row, answer in rows:
        if answer is not None:
            yield answer / (row["peak_gb"] * 1e9) - 1


if __name__ == "__main__":
    main()
