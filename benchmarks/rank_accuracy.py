"""`memfit tune --ranks` on models of at least 100 MB: each rank's figures against its estimate.

Run it in an environment with memfit, mlx-lm and pytest: `python benchmarks/rank_accuracy.py`, with
names of classes for some of them. It prints the table of docs/benchmarks.md, and exits with 1 when
weights, a cache or a state of a rank differ by a byte, or a peak of its run by more than the error
that a trace states. The ranks are processes on this machine, on MLX's CPU backend.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from memfit.estimators.runtimes.source import TRACE_ERROR_PERCENT  # noqa: E402
from tests.checkpoints import CASES, VOCABULARY, save_weights  # noqa: E402

COMMAND = (sys.executable, "-c", "from memfit.cli.__main__ import main; main()", "tune")
WORKLOAD = ("--prompt-tokens", "96", "--max-tokens", "4", "--json")
LEAST_BYTES = 100 * 10**6
LAYERS = 6
_DENSE = {
    **{"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16},
    **{"num_key_value_heads": 4, "head_dim": 64},
}
_EXPERTS = {
    **{"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8},
    **{"moe_intermediate_size": 512, "num_experts_per_tok": 4},
}
# The keys of small cases of the tests made larger, and the bits: MLX's CPU backend has no 16-bit
# `gather_mm`.
MODELS: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": (_DENSE, None),
    "qwen2": (_DENSE, None),
    "qwen3_moe": (
        _EXPERTS
        | {"num_experts": 32, "num_key_value_heads": 4}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        8,
    ),
    "deepseek_v3": (
        _EXPERTS | {"n_routed_experts": 32, "num_key_value_heads": 8} | {"n_group": 4},
        8,
    ),
}
SIZES = (2, 4)
PIPELINE = ((2, None), (2, (4, 2)), (4, None), (4, (1, 2, 1, 2)))


class Case(NamedTuple):
    name: str
    size: int
    parallel: str
    split: tuple[int, ...] | None

    def __str__(self) -> str:
        layers = f", layers {', '.join(map(str, self.split))}" if self.split else ""
        return f"{self.size} {self.parallel}{layers}"


def cases(name: str) -> list[Case]:
    """Return the runs of a class; Llama's has no pipeline, Qwen2's is the dense one that has."""
    found = []
    if name != "qwen2":
        found += [Case(name, size, "tensor", None) for size in SIZES]
    if name != "llama":
        found += [Case(name, size, "pipeline", split) for size, split in PIPELINE]
    return found


def save(path: Path, name: str) -> int:
    """Create a checkpoint with random weights; return its bytes."""
    import mlx.core as mx
    from mlx_lm.utils import quantize_model, save_config

    from tests.oracle import Oracle

    sizes, bits = MODELS[name]
    config = json.loads((CASES / f"{name}.json").read_text()) | sizes
    config |= {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "eos_token_id": 1}
    config["torch_dtype"] = "bfloat16"
    mx.random.seed(0)
    oracle = Oracle(config)
    if bits:
        oracle.model, config = quantize_model(oracle.model, config, 32, bits)
    tensors = oracle.tensors()
    save_weights(path, tensors)
    save_config(config, path / "config.json")
    return sum(tensor.nbytes for tensor in tensors.values())


def ranks_of(path: Path, case: Case) -> list[dict[str, Any]]:
    """Run the whole command; return what it says of each rank."""
    split = ("--split", ",".join(map(str, case.split))) if case.split else ()
    ranks = ("--ranks", str(case.size), "--parallel", case.parallel, *split)
    command = (*COMMAND, str(path), *WORKLOAD, *ranks)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["ranks"]
    return found


def errors(rank: dict[str, Any]) -> tuple[bool, list[float]]:
    """Return whether the exact figures are exact, and the errors of the peaks in percent."""
    estimated, loaded, run = rank["estimated"], rank["loaded"], rank["run"]
    exact = (
        estimated["weights_bytes"] == loaded["weights_bytes"]
        and estimated["kv_bytes"] == run["kv_bytes"]
        and estimated["state_bytes"] == run["ssm_bytes"]
    )
    pairs = (
        (estimated["load_bytes"], loaded["peak_bytes"]),
        (estimated["prefill_bytes"], run["prefill_peak_bytes"]),
        (estimated["decode_bytes"], run["decode_peak_bytes"]),
    )
    return exact, [100 * (planned / measured - 1) for planned, measured in pairs]


def spread(values: list[float]) -> str:
    """Return the range of errors, as one number where they are equal."""
    low, high = (
        f"{each:+.1f} %".replace("+0.0", "0.0").replace("-0.0", "0.0")
        for each in (min(values), max(values))
    )
    return (low if low == high else f"{low} to {high}").replace("-", "−")


def main() -> None:
    """Print one row per run, and every deviation."""
    chosen = sys.argv[1:] or MODELS
    wrong = []
    print("| class | weights | ranks | load | prefill | decode |\n|---|--:|---|--:|--:|--:|")
    for name in chosen:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            nbytes = save(path, name)
            assert nbytes >= LEAST_BYTES, f"{name}: {nbytes} bytes"
            for case in cases(name):
                found = [errors(rank) for rank in ranks_of(path, case)]
                load, *run = ([peaks[index] for _, peaks in found] for index in range(3))
                cells = " | ".join(spread(each) for each in (load, *run))
                print(f"| {name} | {nbytes / 1e6:.0f} MB | {case} | {cells} |", flush=True)
                is_right = all(abs(each) <= TRACE_ERROR_PERCENT for one in run for each in one)
                if not (is_right and all(exact for exact, _ in found)):
                    wrong.append(f"{name} on {case}")
    if wrong:
        sys.exit(f"not as it should be: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
