"""`memfit tune experts` on checkpoints of at least 200 MB: every figure, planned and measured.

Run it in an environment with memfit, mlx-lm and pytest: `python benchmarks/expert_slots.py`, with
names of classes for some of them. It prints a table that docs/benchmarks.md has, and exits with 1
when weights differ by a byte, start-up by more than its tables, or a run with all it needs has
other logits. The routers are planted: some experts are chosen more often than others.

``--policies`` runs each policy in place of that, with the replay of the recorded routing beside it,
and exits with 1 when a policy that computes everything misses or reads more than its replay.
``--small`` does so with checkpoints of a few megabytes.
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

COMMAND = (sys.executable, "-c", "from memfit.cli.__main__ import main; main()")
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
SMALL = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128}
BITS = (None, 4)
POLICIES = {"load": "pinned", "skip": "static", "swap": "swap"}
"""Policies of tune experts, and what replays them."""
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


def save(path: Path, name: str, bits: int | None, shards: int, *, is_small: bool = False) -> int:
    """Create a checkpoint with planted routers; return its bytes."""
    import mlx.core as mx
    from mlx_lm.utils import quantize_model, save_config

    from tests.oracle import Oracle

    case = CASES / f"{name}.json"
    config = json.loads(case.read_text()) if case.exists() else {}
    config |= {**SIZES, **MODELS[name], "torch_dtype": "bfloat16", "eos_token_id": 1}
    config |= {"vocab_size": VOCABULARY} | (SMALL if is_small else {})
    if bits and not is_small:  # as many bytes
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


def measured(path: Path, capacity: int, *more: str) -> dict[str, Any]:
    """Run ``tune experts`` with two prompts and a held-out one."""
    prompts, held_out = path.with_name("prompts.txt"), path.with_name("held-out.txt")
    prompts.write_text("\n".join(PROFILED))
    held_out.write_text("\n".join(HELD_OUT))
    words = ("--prompts", prompts, "--held-out", held_out, "--capacity", capacity)
    step = ("--prefill-step", "16")
    return answer("tune", "experts", path, *words, *step, *(more or ("--max-tokens", "4")))


def answer(*words: object) -> dict[str, Any]:
    """Return what a command answers in JSON."""
    path = words[2]
    ran = subprocess.run(
        [*COMMAND, *map(str, words), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MEMFIT_HOME": f"{path}/home"},
    )
    if ran.returncode not in (0, 1):
        sys.exit(ran.stderr)
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def main() -> None:
    """Measure, print the table, and exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--policies", action="store_true", help="run every policy")
    parser.add_argument("--small", action="store_true", help="with --policies: small checkpoints")
    asked = parser.parse_args()
    if asked.policies:
        sys.exit(_all_policies(asked.names, is_small=asked.small))
    rows = []
    print(
        "| class, bits | experts | weights | start-up | planned | prefill | planned | decode |",
        end="",
    )
    print(" planned | coverage | misses | read | logits |")
    print("|---|---:" + "|---:" * 10 + "|---|")
    for name in asked.names:
        for bits in BITS:
            with tempfile.TemporaryDirectory() as directory:
                rows += list(_rows(Path(directory), name, bits))
    sys.exit(0 if all(row.is_right for row in rows) else 1)


def _rows(folder: Path, name: str, bits: int | None) -> Any:
    path = folder / "model"
    file_bytes = save(path, name, bits, shards=3 if name == "qwen3_moe" else 1)
    if file_bytes < LEAST_BYTES:
        sys.exit(f"{name}: only {file_bytes} bytes")
    result = measured(path, _quarter(name))
    for point in (result["full"], *result["points"]):
        row = Row(f"{name}, {bits or 16}", file_bytes, point)
        print(_line(row, "all" if point is result["full"] else str(point["capacity"])), flush=True)
        yield row


def _quarter(name: str) -> int:
    experts: int = next(value for key, value in MODELS[name].items() if key.endswith("experts"))
    return experts // 4


def _all_policies(names: list[str], *, is_small: bool) -> int:
    """Print what each policy does at a quarter of the experts; return 1 where a replay differs."""
    print("| class, bits | policy | misses | replayed | kB read | replayed | equal | tokens/s |")
    print("|---|---|" + "---:|" * 6)
    wrong = 0
    for name in names:
        for bits in BITS:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "model"
                save(path, name, bits, shards=1, is_small=is_small)
                wrong |= _policies(path, f"{name}, {bits or 16}", _quarter(name))
    return wrong


def _policies(path: Path, name: str, capacity: int) -> int:
    routing, found = path.with_name("routing.json"), {}
    for policy in POLICIES:
        more = ("--max-tokens", "12", "--policy", policy)
        record = ("--record", str(routing)) if policy == "load" else ()
        result = measured(path, capacity, *more, *record)
        found[POLICIES[policy]] = result["points"][0]
    plan = ("plan", "experts", path, "--routing", routing, "--capacity", capacity)
    wrong = 0
    for row in answer(*plan)["replayed"]:
        if row["capacity"] != capacity:
            continue
        cells = ["-", f"{row['misses_per_token']:.2f}", "-", _kb(row["read_bytes_per_token"])]
        cells += ["-", "-"]
        if point := found.get(row["policy"]):
            decode, tokens = point["decode"], point["decode"]["tokens"]
            misses, same = decode["misses"] / tokens, point["agreement"]
            cells[0], cells[2] = f"{misses:.2f}", _kb(decode["read_bytes"] // tokens)
            cells[4] = f"{same['same_tokens']} of {same['tokens']}"
            cells[5] = f"{point['speed']['decode_tokens_per_second']:.0f}"
            if row["policy"] == "pinned" and round(misses, 3) != row["misses_per_token"]:
                wrong = 1
        print(f"| {name} | {row['policy']} | {' | '.join(cells)} |", flush=True)
    return wrong


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


def _kb(nbytes: int) -> str:
    return f"{nbytes / 1e3:.1f}"


if __name__ == "__main__":
    main()
