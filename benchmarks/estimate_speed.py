"""Whole-process times of the command line: medians, compared with the project's limits.

Run it in an environment with memfit and mlx-lm: `python benchmarks/estimate_speed.py`.
It prints the table of docs/performance.md and exits with 1 when a limit is exceeded. Every job
runs once before it is timed, and Python keeps its bytecode, as for an installed package.
"""

import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.models import QWEN3_4B, quantised_tensors, write_checkpoint  # noqa: E402
from tests.sparse import Shapes  # noqa: E402

REPEATS = 9
COMMAND = [sys.executable, "-c", "from memfit.cli.__main__ import main; main()"]

# https://huggingface.co/deepseek-ai/DeepSeek-V3, config.json
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# A mixture in the Hub's layout, one tensor for each expert's projection: the worst real kind.
MANY_TENSORS: dict[str, Any] = {
    **QWEN3_4B,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 65,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


class Row(NamedTuple):
    """One job: its arguments and its limits in seconds and bytes."""

    name: str
    arguments: list[str]
    seconds: float
    nbytes: int | None


def rows(folder: Path) -> Iterator[Row]:
    # In a separate process: a child's resident size starts from its parent's.
    maker = multiprocessing.get_context("spawn").Process(target=make_checkpoints, args=(folder,))
    maker.start()
    maker.join()
    yield Row("memfit --help", ["--help"], 0.15, None)
    yield Row("Qwen3-4B 4-bit, 904 tensors", _estimate(folder / "qwen"), 0.20, None)
    name = "DeepSeek-V3 4-bit, 88 shards, 2,536 tensors"
    yield Row(name, _estimate(folder / "deepseek"), 0.35, None)
    yield Row("160 shards, 100,428 tensors", _estimate(folder / "many"), 1.5, 200_000_000)
    traced = [*_estimate(folder / "qwen")[:-1], "trace"]
    yield Row("Qwen3-4B 4-bit by trace", traced, 0.45, 300_000_000)
    traced = [*_estimate(folder / "deepseek")[:-1], "trace"]
    yield Row("DeepSeek-V3 4-bit by trace", traced, 1.5, 300_000_000)
    policy = ["gate", "--policy", str(folder / "memfit.yaml")]
    yield Row("gate: 20 targets on 5 models", policy, 3.0, None)


def make_checkpoints(folder: Path) -> None:
    """Write the three checkpoints, of real length and without data."""
    for name, config, shards in (("qwen", QWEN3_4B, 1), ("deepseek", DEEPSEEK_V3, 88)):
        quantised = {**config, "quantization": {"group_size": 64, "bits": 4}}
        write_checkpoint(folder / name, quantised, quantised_tensors(config, 4), shards)
    write_checkpoint(folder / "many", MANY_TENSORS, _hub_layout(MANY_TENSORS), shards=160)
    limits = {"peak": "90%", "context": "8k"}
    targets = {
        f"{model}-{device}": {
            "model": model,
            "device": device,
            "workload": {"context": "4k"},
            "limits": limits,
        }
        for model in make_policy_models(folder)
        for device in ("m4-pro-24", "m4-max-64", "m1-8", "m3-ultra-512")
    }
    document = {"schema": "memfit.policy/1", "targets": targets}
    (folder / "memfit.yaml").write_text(json.dumps(document))


def make_policy_models(folder: Path) -> Iterator[str]:
    """Write five sizes of one model and yield their names."""
    for layers in (16, 20, 24, 28, 36):
        config = {**QWEN3_4B, "num_hidden_layers": layers}
        quantised = {**config, "quantization": {"group_size": 64, "bits": 4}}
        write_checkpoint(folder / f"layers-{layers}", quantised, quantised_tensors(config, 4))
        yield f"layers-{layers}"


def _estimate(path: Path) -> list[str]:
    return ["estimate", str(path), "--device", "m4-max-64", "--method", "formula"]


def _hub_layout(config: dict[str, Any]) -> Shapes:
    from tests.oracle import Oracle

    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, array in Oracle(config).tensors().items():
        if "switch_mlp" in name:
            for expert in range(array.shape[0]):
                split = name.replace("switch_mlp", f"experts.{expert}")
                shapes[split] = ("BF16", tuple(array.shape[1:]))
        else:
            shapes[name] = ("BF16", tuple(array.shape))
    return shapes


def measure(row: Row, bytecode: Path) -> tuple[float, int]:
    """Return the median seconds and the largest resident bytes of a job's runs."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [*COMMAND, *row.arguments]
    times, largest = [], 0
    for turn in range(1 + REPEATS):
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if turn:
            times.append(time.perf_counter() - started)
        if os.waitstatus_to_exitcode(status) not in (0, 1):
            raise SystemExit(f"{row.name}: exit code {os.waitstatus_to_exitcode(status)}")
        largest = max(largest, _resident(usage))
    return statistics.median(times), largest


def _resident(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Print the table; exit with 1 when a limit is exceeded."""
    broken = False
    print("| job | median | limit | resident | limit |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder)):
            seconds, resident = measure(row, Path(folder) / "bytecode")
            broken |= seconds > row.seconds or bool(row.nbytes and resident > row.nbytes)
            limit = f"{row.nbytes / 1e6:.0f} MB" if row.nbytes else ""
            print(
                f"| {row.name} | {seconds:.3f} s | {row.seconds:.2f} s"
                f" | {resident / 1e6:.0f} MB | {limit} |",
                flush=True,
            )
    sys.exit(broken)


if __name__ == "__main__":
    main()
