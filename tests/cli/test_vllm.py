"""``--runtime vllm`` on the command line: its settings, its pool, and nothing of other runtimes."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_config

SAMPLES = Path(__file__).parents[2] / "sample_configs"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def test_no_sentence_is_about_another_runtime(memfit: Memfit, tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", {**QWEN3_4B, "quantization_config": GPTQ})
    for where in (("--device", "rtx-3060"), ("--device", "t4"), ()):
        run = memfit("estimate", model, "--runtime", "vllm", "--explain", *where)
        assert run.code == 0
        assert "mlx" not in run.out.lower()
        assert "wired" not in run.out.lower()
        assert "Mac" not in run.out
    share = memfit("estimate", model, "--runtime", "vllm", "--device", "rtx-3060").out
    assert "GB of CUDA graphs" in " ".join(share.split())
    assert "mlx" not in memfit("plan", "context", model, "--runtime", "vllm").out.lower()
    run = memfit("estimate", model, "--runtime", "vllm", "--device", "rtx-3060", "--json")
    assert "mlx" not in run.out.lower()


def test_the_longest_prompt_is_what_the_pool_holds(memfit: Memfit, tmp_path: Path) -> None:
    model = write_config(tmp_path, {**QWEN3_4B, "max_position_embeddings": 131_072})
    # The tenth of the memory that other runtimes leave free is not free under this share.
    share = ("--gpu-memory-utilization", "0.98")
    arguments = (model, "--runtime", "vllm", "--device", "rtx-3060", *share, "--json")
    answer = memfit("estimate", *arguments).json
    tokens, held = answer["recommendation"]["context_tokens"]["value"], answer["pool"]["tokens"]
    assert tokens <= held < tokens + 256
    assert [action["goal"] for action in answer["actions"]].count("request") == 1
    assert all(action["settings"] for action in answer["actions"][1:])
    plan = memfit("plan", "context", *arguments).json
    assert plan["longest_context"] == tokens <= plan["automatic"]["right_tokens"]
    assert plan["recommended_bytes"] == answer["pool"]["budget_bytes"]


def test_the_share_of_the_memory_can_be_set(memfit: Memfit) -> None:
    llama = str(SAMPLES / "llama-3.1-8b.yaml")
    arguments = ("estimate", llama, "--runtime", "vllm", "--device", "rtx-4090", "--json")
    shares = {
        share: memfit(*arguments, "--gpu-memory-utilization", share).json["pool"]
        for share in ("0.9", "0.95")
    }
    assert shares["0.9"]["budget_bytes"] == 24564 * 2**20 * 90 // 100
    assert shares["0.95"]["tokens"] > shares["0.9"]["tokens"]
    run = memfit(*arguments[:-1], "--gpu-memory-utilization", "1.1")
    assert (run.code, run.err.count("\n")) == (2, 1)
    assert "--gpu-memory-utilization: '1.1' is not a share" in run.err
    run = memfit("estimate", llama, "--gpu-memory-utilization", "0.9")
    assert run.code == 2
    assert "--gpu-memory-utilization: mlx-lm has no such setting" in run.err


@pytest.mark.parametrize(
    ("device", "tokens"),
    [
        ("rtx-4090", 2048),
        ("a100-80", 2048),
        ("dgx-spark", 2048),
        ("h100-80", 8192),
        ("b200", 16384),
    ],
)
def test_batches_are_those_of_the_gpu(memfit: Memfit, device: str, tokens: int) -> None:
    arguments = ("estimate", str(SAMPLES / "llama-3.1-8b.yaml"), "--runtime", "vllm", "--json")
    assert memfit(*arguments, "--device", device).json["workload"]["prefill_step"] == tokens


def test_weights_of_mlx_are_not_loadable(memfit: Memfit) -> None:
    run = memfit("estimate", str(SAMPLES / "qwen3-4b-4bit.yaml"), "--runtime", "vllm", "--json")
    assert "not-loadable" in {note["code"] for note in run.json["notes"]}


@pytest.mark.parametrize("runtime", ["vllm", "llama.cpp", "zinc"])
def test_a_conversion_that_the_runtime_does_not_load_is_no_advice(
    memfit: Memfit, runtime: str
) -> None:
    arguments = ("estimate", str(SAMPLES / "qwen3-0.6b.yaml"), "--quantize", "8", "--json")
    answer = memfit(*arguments, "--memory", "64GB", "--runtime", runtime).json
    assert answer["actions"][0]["commands"] == []
    assert memfit(*arguments, "--memory", "64GB").json["actions"][0]["commands"]


def test_a_draft_model_leaves_at_most_the_rest_of_the_pool(memfit: Memfit) -> None:
    llama, draft = (str(SAMPLES / name) for name in ("llama-3.1-8b.yaml", "llama-3.2-3b.yaml"))
    arguments = ("estimate", llama, "--runtime", "vllm", "--device", "h100-80", "--json")
    alone = memfit(*arguments).json["pool"]
    answer = memfit(*arguments, "--draft", draft).json
    assert answer["components"]["draft"]["bytes"] > 6 * 10**9
    weights = answer["pool"]["draft_bytes"]
    assert weights == memfit("estimate", draft, *arguments[2:]).json["pool"]["weights_bytes"]
    assert answer["pool"]["pool_bytes"] == alone["pool_bytes"] - weights
    assert [note["code"] for note in answer["notes"]] == ["draft-pool"]
    shown = memfit(*arguments[:-1], "--draft", draft, "--breakdown").out
    assert "its pool is an upper bound" in " ".join(shown.split())
    assert [line.split()[-2:] for line in shown.splitlines() if "KV pool" in line] == [
        ["at", "most"]
    ]


def test_a_format_that_only_the_name_has_is_said(memfit: Memfit, tmp_path: Path) -> None:
    model = write_config(tmp_path / "Qwen3-4B-NVFP4", QWEN3_4B)
    answer = memfit("estimate", model, "--runtime", "vllm", "--json").json
    assert answer["components"]["weights"]["basis"] == "bound"
    assert any("the name says NVFP4" in note["message"] for note in answer["notes"])


def test_a_comparison_has_the_machine_of_an_estimate(memfit: Memfit) -> None:
    llama, qwen = (str(SAMPLES / name) for name in ("llama-3.1-8b.yaml", "qwen3-0.6b.yaml"))
    options = ("--runtime", "vllm", "--device", "rtx-4090", "--context", "4k", "--json")
    compared = memfit("compare", llama, qwen, *options).json
    assert compared["device"] == memfit("estimate", llama, *options).json["device"]
    under = memfit("compare", llama, qwen, *options[2:]).json  # mlx-lm
    assert under["device"]["working_set_bytes"] < compared["device"]["working_set_bytes"]
