"""`memfit tune experts` on checkpoints of at least 200 MB: every figure, planned and measured.

Run it in an environment with memfit, mlx-lm and pytest: `python benchmarks/expert_slots.py`, with
names of classes for some of them. It prints a table that docs/benchmarks.md has, and exits with 1
when weights differ by a byte, start-up by more than its tables, or a run with all it needs has
other logits. The routers are planted: some experts are chosen more often than others.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.checkpoints import (  # noqa: E402
    CASES,
    SENTENCES,
    VOCABULARY,
    plant_routers,
    save_tokenizer,
    save_weights,
)

COMMAND = (sys.executable, "-c", "from memfit.cli.__main__ import main; main()", "tune", "experts")
LEAST_BYTES = 200 * 10**6
# Tables of slots, and an array of the kept experts' numbers while a tensor is read.
STARTUP_TOLERANCE = 16384
SIZES = {"hidden_size": 512, "num_hidden_layers": 2}
# The keys of small cases of the tests, and of one class without a case, made larger.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **{"num_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
        **{"decoder_sparse_step": 1, "mlp_only_layers": []},
    },
    "deepseek_v3": {
        **{"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
        **{"n_group": 4, "topk_group": 2},
    },
    "gpt_oss": {
        **{"num_local_experts": 64, "num_experts_per_tok": 4, "experts_per_token": 4},
        **{"intermediate_size": 768, "layer_types": None},
        "sliding_window": 128,
    },
    "glm4_moe_lite": {
        **{"model_type": "glm4_moe_lite", "n_routed_experts": 128, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 48},
        **{"v_head_dim": 32, "intermediate_size": 512, "max_position_embeddings": 4096},
    },
}
BITS = (None, 4)
PROFILED = SENTENCES[:2]
HELD_OUT = ["The lazy model is counted in boxes, and every fox has a reason to be quick."]


class Row(NamedTuple):
    name: str
    file_bytes: int
    point: dict[str, Any]

    @property
    def is_right(self) -> bool:
        """Whether exact figures are exact, and the logits those of the full model."""
        weights, startup = self.point["weights"], self.point["startup"]
        if self.point["agreement"] and not self.point["agreement"]["identical"]:
            return False
        if weights["planned_bytes"] is None:
            return True
        off = startup["measured_bytes"] - startup["planned_bytes"]
        is_exact: bool = weights["planned_bytes"] == weights["measured_bytes"]
        return is_exact and off <= STARTUP_TOLERANCE


def save(path: Path, name: str, bits: int | None, shards: int) -> int:
    """Create a checkpoint with planted routers; return its bytes."""
    import mlx.core as mx
    from mlx_lm.utils import quantize_model, save_config

    from tests.oracle import Oracle

    case = CASES / f"{name}.json"
    config = json.loads(case.read_text()) if case.exists() else {}
    config |= {**SIZES, **MODELS[name], "torch_dtype": "bfloat16", "eos_token_id": 1}
    config |= {"vocab_size": VOCABULARY}
    if bits:  # as many bytes
        config["num_hidden_layers"] = 6
    if config.get("layer_types", 0) is None:
        half = config["num_hidden_layers"] // 2
        config["layer_types"] = ["sliding_attention", "full_attention"] * half
    mx.random.seed(0)
    oracle = Oracle(config)
    plant_routers(oracle)
    if bits:
        oracle.model, config = quantize_model(oracle.model, config, 32, bits)
    tensors = oracle.tensors()
    save_weights(path, tensors, shards)
    save_config(config, path / "config.json")
    save_tokenizer(path, has_chat_template=False)
    return sum(tensor.nbytes for tensor in tensors.values())


def measured(path: Path, prompts: Path, held_out: Path, capacities: str) -> dict[str, Any]:
    words = ("--prompts", prompts, "--held-out", held_out, "--capacity", capacities)
    more = ("--max-tokens", "4", "--prefill-step", "16", "--json")
    ran = subprocess.run(
        [*COMMAND, str(path), *map(str, words), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MEMFIT_HOME": str(path / "home")},
    )
    if ran.returncode not in (0, 1):
        sys.exit(ran.stderr)
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def main() -> None:
    """Measure, print the table, and exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    rows = []
    print(
        "| class, bits | experts | weights | start-up | planned | prefill | planned | decode |",
        end="",
    )
    print(" planned | coverage | misses | read | logits |")
    print("|---|---:" + "|---:" * 10 + "|---|")
    for name in parser.parse_args().names:
        for bits in BITS:
            with tempfile.TemporaryDirectory() as directory:
                rows += list(_rows(Path(directory), name, bits))
    sys.exit(0 if all(row.is_right for row in rows) else 1)


def _rows(folder: Path, name: str, bits: int | None) -> Any:
    path = folder / "model"
    prompts, held_out = folder / "prompts.txt", folder / "held-out.txt"
    prompts.write_text("\n".join(PROFILED))
    held_out.write_text("\n".join(HELD_OUT))
    file_bytes = save(path, name, bits, shards=3 if name == "qwen3_moe" else 1)
    if file_bytes < LEAST_BYTES:
        sys.exit(f"{name}: only {file_bytes} bytes")
    experts = next(value for key, value in MODELS[name].items() if key.endswith("_experts"))
    result = measured(path, prompts, held_out, f"{experts // 4}")
    for point in (result["full"], *result["points"]):
        row = Row(f"{name}, {bits or 16}", file_bytes, point)
        print(_line(row, "all" if point is result["full"] else str(point["capacity"])), flush=True)
        yield row


def _line(row: Row, capacity: str) -> str:
    point = row.point
    figures = ("startup", "prefill_peak", "decode_peak")
    pairs = [_mb(point[figure][side]) for figure in figures for side in _SIDES]
    decode, found = point["decode"], point["agreement"]
    tokens = max(1, decode["tokens"])
    cells = [
        row.name,
        capacity,
        _mb(point["weights"]["measured_bytes"]),
        *pairs,
        f"{point['coverage_percent']:.1f} %",
        f"{decode['misses'] / tokens:.2f}",
        _mb(decode["read_bytes"] // tokens),
        "" if found is None else "identical" if found["identical"] else "differ",
    ]
    return f"| {' | '.join(cells)} |"


_SIDES = ("measured_bytes", "planned_bytes")


def _mb(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.2f}"


if __name__ == "__main__":
    main()
