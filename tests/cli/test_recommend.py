"""Recommendations agree with their estimate, and never make it fail."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Memfit
from tests.models import QWEN3_4B_4BIT, QWEN3_NEXT_80B, SAMPLES, write_config

# https://huggingface.co/google/gemma-2-2b-it, config.json; mlx-lm cannot use its quantised cache.
GEMMA2 = {**QWEN3_4B_4BIT, "model_type": "gemma2", "max_position_embeddings": 8192}


def _reasons(memfit: Memfit, config: dict[str, Any], path: Path, *options: str) -> dict[str, str]:
    run = memfit("estimate", write_config(path, config), "--json", *options)
    assert run.code in (0, 1), run.err
    recommendation = run.json["recommendation"]
    return {name: recommendation[name]["reason"] for name in recommendation if name != "basis"}


def test_kv_bits_that_a_longer_run_cannot_have_are_refused_for_a_short_prompt(
    memfit: Memfit, tmp_path: Path
) -> None:
    # mlx-lm quantises from token 5000 on, and no command bounds how long a run becomes.
    options = ("--kv-bits", "8", "--context", "1000", "--memory", "32GB", "--json")
    run = memfit("estimate", write_config(tmp_path, GEMMA2), *options)
    assert run.code == 3
    assert "cannot attend over a quantised cache" in run.json["message"]


def test_kv_bits_that_reach_no_cache_are_not_searched(memfit: Memfit) -> None:
    options = ("--context", "8192", "--device", "m4-pro-24", "--quantize", "4", "--json")
    falcon = str(SAMPLES / "falcon-h1-7b.yaml")
    found = memfit("estimate", falcon, *options).json
    assert found["recommendation"]["kv_bits"]["state"] == "not_applicable"
    assert not any("kv_bits" in action["settings"] for action in found["actions"])
    asked = memfit("estimate", falcon, *options, "--kv-bits", "4").json
    assert "mlx-lm quantises no cache of falcon_h1: KV bits do nothing" in [
        note["message"] for note in asked["notes"]
    ]
    assert asked["peak_bytes"] == found["peak_bytes"]


@pytest.mark.parametrize("step", ["1", "2"])
def test_a_small_prefill_step_does_not_limit_the_search(
    memfit: Memfit, tmp_path: Path, step: str
) -> None:
    config = {**QWEN3_4B_4BIT, "max_position_embeddings": 2**19}
    options = ("--context", "300", "--prefill-step", step, "--memory", "512GB")
    context = _reasons(memfit, config, tmp_path, *options)["context_tokens"]
    assert context == "524288 tokens, the model's own limit, fit"


def test_a_prompt_too_long_for_small_steps_still_has_a_recommendation(
    memfit: Memfit, tmp_path: Path
) -> None:
    options = ("--context", "100m", "--memory", "8GB")
    step = _reasons(memfit, QWEN3_4B_4BIT, tmp_path, *options)["prefill_step"]
    assert step.startswith("none")


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (None, "1048576 tokens, the longest that is searched, fit"),
        (4096, "4096 tokens, the model's own limit, fit"),
        (4000, "3840 tokens fit; the model's own limit is 4000"),
        (200, "no multiple of 256 is within the limit of 200 tokens"),
    ],
)
def test_the_limit_of_the_search_is_reported_as_such(
    memfit: Memfit, tmp_path: Path, limit: int | None, reason: str
) -> None:
    config = {**QWEN3_4B_4BIT, "max_position_embeddings": limit}
    options = ("--context", "100", "--memory", "512GB")
    assert _reasons(memfit, config, tmp_path, *options)["context_tokens"] == reason


def test_a_quantised_cache_is_not_suggested_where_it_needs_more(
    memfit: Memfit, tmp_path: Path
) -> None:
    # Attention over a quantised cache is not fused: its scores need more than the cache saves,
    # except for long prompts of a model without fused attention.
    path = write_config(tmp_path, QWEN3_4B_4BIT)
    small = memfit("estimate", path, "--memory", "8GB", "--json").json
    longest = small["recommendation"]["context_tokens"]["value"]
    # The trace finds the same.
    assert longest == 15616
    for action in small["actions"]:
        assert "kv_bits" not in action["settings"] or action["context_tokens"] > longest
    config = {**QWEN3_NEXT_80B, "quantization": {"group_size": 64, "bits": 4}}
    large = memfit("estimate", write_config(path, config), "--memory", "64GB", "--json").json
    assert large["actions"][-1]["settings"]["kv_bits"] == 8


def test_the_sysctl_line_is_for_the_given_workload(memfit: Memfit, tmp_path: Path) -> None:
    options = ("--memory", "16GB", "--context")

    def advice(context: str) -> Any:
        path = write_config(tmp_path, QWEN3_4B_4BIT)
        result = memfit("estimate", path, "--json", *options, context).json
        return {**result["recommendation"], "needed": result["needed_bytes"]}

    answer = advice("70000")
    asked, mebibytes = answer["wired_limit_mb"], -(-answer["needed"] // 2**20)
    assert (asked["state"], asked["value"]) == ("change", mebibytes)
    assert f"iogpu.wired_limit_mb={mebibytes} would" in asked["reason"]
    assert "70000 tokens asked for" in asked["reason"]
    assert "macOS resets it at restart" in asked["reason"]
    assert "mlx issue 3186" in asked["reason"]
    assert advice("4k")["wired_limit_mb"]["state"] == "keep"
    # More than the machine has, or more than leaves enough for the system.
    assert advice("128k")["wired_limit_mb"]["state"] == "impossible"
    assert advice("80000")["wired_limit_mb"]["state"] == "impossible"


@pytest.mark.exhaustive(daily=True)
def test_an_allocation_above_the_devices_limit_is_reported_with_both_sizes(
    memfit: Memfit, tmp_path: Path
) -> None:
    asked = ("--context", "128k", "--prefill-step", "16384", "--device", "m4-max-64")
    run = memfit("estimate", write_config(tmp_path, QWEN3_NEXT_80B), "--json", *asked)
    assert run.json["exceeded"] == ["working_set", "max_buffer"]
    notes = {note["code"]: note["message"] for note in run.json["notes"]}
    # 16 heads x 16,383 queries x 131,071 keys x 2 bytes: the last token runs alone.
    assert notes["max-buffer"].startswith("one allocation, attention scores, takes 68.8 GB")
