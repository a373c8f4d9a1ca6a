"""``memfit plan context`` and ``memfit plan growth`` on the command line."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_config

SAMPLES = Path(__file__).parents[2] / "sample_configs"
DENSE = SAMPLES / "qwen3-8b-4bit.yaml"
HYBRID = SAMPLES / "qwen3.5-35b-a3b.yaml"
TRAFFIC = SAMPLES / "plans" / "traffic.csv"
TOKEN = 147_456


@pytest.mark.exhaustive
def test_the_largest_context_fits_and_one_more_token_does_not(memfit: Memfit) -> None:
    plan = memfit("plan", "context", DENSE, "--memory", "8GB", "--json").json
    tokens, budget = plan["unified"]["tokens"], plan["unified"]["budget_bytes"]
    assert 0 < tokens < plan["ceilings"]["effective"]
    for count, fits in ((tokens, True), (tokens + 1, False)):
        one = memfit("plan", "context", DENSE, "--memory", "8GB", "--context", str(count), "--json")
        assert (one.json["fit"]["required_bytes"] <= budget) == fits


def test_the_largest_batch_fits_and_one_more_request_does_not(memfit: Memfit) -> None:
    plan = memfit("plan", "context", DENSE, "--memory", "16GB", "--json").json
    most = plan["largest_batch"]
    for batch, fits in ((most, True), (most + 1, False)):
        run = memfit("estimate", DENSE, "--memory", "16GB", "--batch", str(batch), "--json")
        assert (run.json["verdict"] == "fits") == fits


def test_ceilings_limit_every_context(memfit: Memfit) -> None:
    arguments = ("--memory", "64GB", "--ceiling", "8k", "--backend-cap", "4k", "--json")
    plan = memfit("plan", "context", DENSE, *arguments).json
    expected = {"model": 40960, "requested": 8192, "backend": 4096, "effective": 4096}
    assert plan["ceilings"] == expected
    assert plan["unified"]["tokens"] == plan["longest_context"] == 4096
    assert {cell["context_tokens"] for cell in plan["matrix"]} == {4096}


def test_zincs_minimum_is_shown_together_with_does_not_fit(memfit: Memfit) -> None:
    run = memfit("plan", "context", HYBRID, "--memory", "32GB", "--runtime", "zinc", "--json")
    own = run.json["automatic"]
    assert (own["tokens"], own["right_tokens"]) == (4096, 0)
    assert own["reason"].startswith("zinc's floor of 4096 tokens needs")
    assert run.code == 1
    profile = run.json["profile"]
    assert profile["fixed_device_local_bytes"] == 89_078_784
    assert profile["fixed_host_visible_bytes"] == 1_018_944
    assert profile["device_local_bytes_per_token"] == 163_840
    table = memfit("plan", "context", HYBRID, "--memory", "32GB", "--runtime", "zinc").out
    assert "does not fit" in table
    assert "163.9 kB as zinc charges it, 41.0 kB in the layers that attend" in table


def test_a_gpu_with_its_own_memory_has_two_budgets_under_zinc(memfit: Memfit) -> None:
    words = ("plan", "context", DENSE, "--runtime", "zinc", "--device")
    mac, gpu = (memfit(*words, name, "--json").json for name in ("m4-max-64", "rtx-3060"))
    assert (mac["host"], gpu["unified"]) == (None, None)
    profile, tokens = gpu["profile"], gpu["device_local"]["tokens"]
    token, fixed = (
        profile[name] for name in ("device_local_bytes_per_token", "fixed_device_local_bytes")
    )
    left = gpu["device_local"]["budget_bytes"] - gpu["weights_bytes"] - gpu["margin_bytes"] - fixed
    assert tokens == left // token
    on_host = profile["fixed_host_visible_bytes"] + 4 * tokens
    assert gpu["host"] == {"needed_bytes": on_host, "memory_bytes": None}
    shown = memfit(*words, "rtx-3060").out
    assert "unified" not in shown
    assert "host memory for it" in shown
    assert "unified" in memfit(*words, "m4-max-64").out


def test_foundrys_budget_is_exceeded_by_its_own_context(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METALLIC_KV_MEMORY_BUDGET_MB", "1000")
    arguments = ("--memory", "32GB", "--runtime", "foundry", "--json")
    own = memfit("plan", "context", DENSE, *arguments).json["automatic"]
    paid = 1000 * 2**20 // TOKEN
    assert own["budget_bytes"] == 1000 * 2**20
    assert own["tokens"] == -(-paid // 128) * 128 > paid
    assert own["right_tokens"] == paid // 128 * 128
    assert "aligns up after dividing" in own["reason"]


@pytest.mark.parametrize("value", ["1", "0"])
def test_foundrys_shared_cache_is_in_host_memory(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    # As in plan static: any value of the variable enables sharing.
    monkeypatch.setenv("METALLIC_KV_CACHE_SHARED", value)
    monkeypatch.setenv("METALLIC_MAX_CONTEXT_LEN", "2048")
    plan = memfit("plan", "context", DENSE, "--runtime", "foundry", "--json").json
    assert plan["profile"]["host_visible_bytes_per_token"] == TOKEN
    assert plan["profile"]["device_local_bytes_per_token"] == 0
    assert plan["ceilings"]["effective"] == 2048
    assert any("Foundry stops at 2048 tokens" in note["message"] for note in plan["notes"])


def test_traffic_is_sized_from_recorded_requests(memfit: Memfit, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = "".join(f"{prompt},100\n" for prompt in range(900, 99_900, 1000))
    path.write_text("prompt_tokens,completion_tokens\n" + rows + "1,0\n")
    arguments = ("--memory", "16GB", "--traffic", path, "--json")
    traffic = memfit("plan", "context", DENSE, *arguments).json["traffic"]
    assert traffic["requests"] == 100
    assert traffic["total"]["p99"] == 98_000
    assert traffic["context_for_99"] == 98_048
    assert traffic["longest_context"] == 40_704
    assert traffic["fitting"] == 41
    assert traffic["at_once_for_99"] == 0
    assert traffic["at_once_of_mean"] == 0


@pytest.mark.exhaustive
def test_the_traffic_example_is_read(memfit: Memfit) -> None:
    run = memfit("plan", "context", DENSE, "--memory", "32GB", "--traffic", TRAFFIC, "--plot")
    assert run.code == 0
    assert "99 % of the requests are served by a context of" in run.out
    assert "Memory against context" in run.out


def test_without_a_device_there_is_no_verdict(memfit: Memfit) -> None:
    run = memfit("plan", "context", DENSE, "--json")
    assert run.code == 0
    assert run.json["fit"] is None
    assert run.json["unified"] is None
    assert "name a device" in memfit("plan", "context", DENSE).out


@pytest.mark.parametrize("command", ["context", "growth"])
def test_markdown_is_a_section(memfit: Memfit, command: str) -> None:
    run = memfit("plan", command, DENSE, "--memory", "16GB", "--format", "markdown", "--plot")
    assert run.out.startswith("## Qwen3-8B-4bit")
    assert "| --- | ---: |" in run.out
    assert "```text" in run.out


def test_growth_shows_every_rule(memfit: Memfit) -> None:
    run = memfit("plan", "growth", DENSE, "--tokens", "5000", "--json")
    rules = {rule["runtimes"][0]: rule for rule in run.json["rules"]}
    assert {rule["growth"] for rule in rules.values()} == {
        "steps",
        "doubling",
        "contiguous",
        "paged",
    }
    assert rules["foundry"]["peak_bytes"] == 3 * 4096 * TOKEN
    assert rules["mlx-lm"]["allocated_bytes"] == 5120 * TOKEN
    assert rules["vllm"]["allocated_bytes"] == 5008 * TOKEN


def test_growth_shows_where_the_budget_ends(memfit: Memfit) -> None:
    arguments = ("--turns", "10", "--turn-tokens", "1000", "--budget", f"{6144 * TOKEN - 1}")
    run = memfit("plan", "growth", DENSE, *arguments, "--runtime", "foundry")
    assert run.code == 1
    assert "foundry: at token 2049 of a session, in turn 3: 906.0 MB alive" in run.out


def test_growth_uses_the_budget_left_on_the_device(memfit: Memfit) -> None:
    run = memfit("plan", "growth", DENSE, "--memory", "16GB", "--json")
    budgets = {rule["runtimes"][0]: rule["budget_bytes"] for rule in run.json["rules"]}
    alone = memfit("estimate", DENSE, "--memory", "16GB", "--json").json
    working_set = alone["device"]["working_set_bytes"]
    weights = alone["components"]["weights"]["resident_bytes"]
    assert budgets["mlx-lm"] == working_set * 9 // 10 - weights
    assert budgets["foundry"] == working_set // 2  # what it gives its cache
    assert run.json["budget_bytes"] is None
    single = memfit("plan", "growth", DENSE, "--memory", "16GB", "--runtime", "mlx-lm", "--json")
    assert single.json["budget_bytes"] == budgets["mlx-lm"]


# A 4-bit model that mlx-lm does not load as it is, and vllm does.
GPTQ = {
    **QWEN3_4B,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
}


@pytest.mark.parametrize("options", [(), ("--gpu-memory-utilization", "0.5")])
def test_growth_under_vllm_has_the_pool_of_the_estimate(
    memfit: Memfit, tmp_path: Path, options: tuple[str, ...]
) -> None:
    model = write_config(tmp_path / "gptq", GPTQ)
    arguments: tuple[str | Path, ...] = (model, "--runtime", "vllm", "--device", "rtx-3060")
    arguments += options
    run = memfit("plan", "growth", *arguments, "--json")
    pool = memfit("estimate", *arguments, "--json").json["pool"]
    assert run.json["budget_bytes"] == pool["pool_bytes"] > 0
    assert "MLX" not in memfit("plan", "growth", *arguments).out


def test_growth_rejects_a_share_that_no_runtime_has(memfit: Memfit) -> None:
    share = ("--gpu-memory-utilization", "0.5")
    run = memfit("plan", "growth", DENSE, "--runtime", "mlx-lm", *share)
    assert (run.code, "give --runtime vllm" in run.err) == (2, True)


def test_kv_bits_that_longer_prompts_cannot_have_are_rejected_at_every_length(
    memfit: Memfit,
) -> None:
    # mlx-lm would quantise a rotating cache from token 5000 on, and does not support it.
    arguments = (SAMPLES / "gemma-3-27b.yaml", "--kv-bits", "8", "--memory", "128GB")
    for command in (("plan", "context"), ("estimate",)):
        run = memfit(*command, *arguments)
        assert run.code == 3
        assert "rotating" in run.err


def test_no_context_that_was_given_is_dropped_from_the_table(memfit: Memfit) -> None:
    sample = Path(__file__).parents[2] / "sample_configs" / "qwen3-4b-4bit.yaml"
    arguments = ("plan", "context", sample, "--memory", "32GB", "--contexts", "8k,64k")
    plan = memfit(*arguments, "--json").json
    assert {cell["context_tokens"] for cell in plan["matrix"]} == {8192, 65536}
    notes = {note["code"]: note["message"] for note in plan["notes"]}
    text = "65536 tokens are above 40960, the most that can be run"
    assert notes["above-ceiling"] == text
    assert text in " ".join(memfit(*arguments).out.split())
    usual = memfit("plan", "context", sample, "--memory", "32GB", "--json").json
    assert max(cell["context_tokens"] for cell in usual["matrix"]) == 32768


def test_kv_bits_of_a_batch_are_noted_as_mlx_lm_runs_them(memfit: Memfit) -> None:
    sample = Path(__file__).parents[2] / "sample_configs" / "qwen3-4b-4bit.yaml"
    arguments = ("estimate", sample, "--batch", "4", "--kv-bits", "8", "--json")
    assert "kv-batch" in [note["code"] for note in memfit(*arguments).json["notes"]]


@pytest.mark.exhaustive(daily=True)
def test_programs_get_it_and_no_printed_command_has_it(memfit: Memfit) -> None:
    asked = ("plan", "context", "qwen3.6-35b-a3b", "--quantize", "4", "--memory", "32GB")
    answer = memfit(*asked, "--json").json
    schedule = answer["schedule"]
    assert schedule["steps"][0][1] == 2048
    assert schedule["context_with_first_step"] == answer["longest_context"]
    text = " ".join(memfit(*asked).out.split())
    assert f"in place of {schedule['context_with_first_step']} with 2048 alone" in text
    assert "mlx_lm.generate" not in text
