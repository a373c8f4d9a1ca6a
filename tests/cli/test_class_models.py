"""Every command answers for a model that only mlx-lm's class describes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.gating import target, write_policy
from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_config

CASES = json.loads((Path(__file__).parents[1] / "trace" / "cases.json").read_text())
MOE: dict[str, Any] = {
    **next(case for case in CASES if case["model_type"] == "glm4_moe_lite"),
    "hidden_size": 512,
    "vocab_size": 4096,
    "kv_lora_rank": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 32_768,
    # No recording of the class has biases, so that it is traced.
    "attention_bias": True,
}
SMALL = {**QWEN3_4B, "num_hidden_layers": 3, "vocab_size": 4096}
ROOM = ("--working-set", "300MB", "--margin", "0")


@pytest.fixture(autouse=True)
def _mlx_lm() -> None:
    pytest.importorskip("mlx_lm")


# As GLM-4.7-Flash it caches a latent, of widths that can be quantised.
LATENT = {**MOE, "qk_rope_head_dim": 64}
UNREADABLE = "mlx-lm cannot attend over a quantised cache of this model; leave out KV bits"


@pytest.mark.parametrize("command", [("estimate",), ("plan", "context"), ("plan", "server")])
def test_kv_bits_that_a_class_cannot_read_are_refused_in_one_plain_line(
    memfit: Memfit, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = write_config(tmp_path, LATENT)
    run = memfit(*command, path, "--device", "m4-pro-48", "--kv-bits", "8", "--context", "8k")
    assert (run.code, run.out) == (3, "")
    assert run.err == f"memfit: glm4_moe_lite: {UNREADABLE}\n"


def test_a_plan_says_once_that_kv_bits_cannot_be_read(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, LATENT)
    asked = ("--device", "m4-pro-48", "--kv-bits", "8", "--context", "4500")
    run = memfit("plan", "context", path, *asked)
    assert (run.code, (run.out + run.err).count("cannot attend")) == (3, 1)


# The class refuses a config without its format.
def test_a_class_that_packs_its_weights_itself_is_sized_as_packed(
    memfit: Memfit, tmp_path: Path
) -> None:
    from tests.oracle import Oracle

    config = next(case for case in CASES if case["model_type"] == "prism_hadamard_qwen35")
    path, oracle = write_config(tmp_path, config), Oracle(config)
    found = memfit("estimate", path, "--device", "m4-pro-48", "--json").json
    assert found["components"]["weights"]["bytes"] == oracle.weight_bytes()
    # The same without one of its packed matrices.
    *others, last = config["modules"]
    assert last["path"] == "model.layers.1.mlp.down_proj"
    less = write_config(tmp_path / "less", {**config, "modules": others})
    plain = memfit("estimate", less, "--device", "m4-pro-48", "--json").json
    assert plain["model"]["parameters"] == found["model"]["parameters"]
    run = memfit("estimate", path, "--device", "m4-pro-48", "--quantize", "4")
    assert (run.code, "mlx_lm.convert cannot quantise packed weights" in run.err) == (3, True)


def test_an_estimate_recommends_settings_that_a_trace_confirms(
    memfit: Memfit, tmp_path: Path
) -> None:
    path = write_config(tmp_path, MOE)
    found = memfit("estimate", path, "--context", "300", *ROOM, "--json").json["recommendation"]
    tokens = found["context_tokens"]["value"]
    assert 0 < tokens < MOE["max_position_embeddings"]
    there = memfit("estimate", path, "--context", str(tokens), *ROOM, "--json").json
    assert (there["verdict"], there["method"]) == ("fits", "trace")
    assert found["wired_limit_bytes"]["value"] == there["peak_bytes"]
    longer = memfit("estimate", path, "--context", str(tokens * 5 // 4), *ROOM, "--json").json
    assert longer["verdict"] != "fits"


def test_the_grid_is_between_traced_prompts(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, MOE)
    data = memfit("estimate", path, "--memory", "16GB", "--json").json
    assert data["grid"]["method"] == "trace"
    [row] = data["grid"]["rows"]
    assert row["cells"][0]["needed_bytes"] == data["needed_bytes"]


@pytest.mark.parametrize("tokens", ["1000", "7000"])
def test_what_is_asked_is_traced_in_the_grid_too(
    memfit: Memfit, tmp_path: Path, tokens: str
) -> None:
    path = write_config(tmp_path, MOE)
    data = memfit("estimate", path, "--context", tokens, *ROOM, "--json").json
    row = data["grid"]["rows"][0]
    cell = row["cells"][data["grid"]["columns"].index(int(tokens))]
    assert cell["needed_bytes"] == data["needed_bytes"]
    assert row["context_tokens"] >= data["recommendation"]["context_tokens"]["value"]


def test_with_ample_memory_the_longest_context_is_traced(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, MOE)
    data = memfit("estimate", path, "--memory", "64GB", "--json").json["recommendation"]
    assert data["context_tokens"]["value"] == MOE["max_position_embeddings"]
    assert "by formula" not in json.dumps(data)


def test_experts_are_planned(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, MOE)
    plan = memfit("plan", "experts", path, "--memory", "16GB", "--json").json
    layers = MOE["num_hidden_layers"] - MOE["first_k_dense_replace"]
    assert (plan["experts"], plan["top_k"], plan["layers"]) == (16, 4, layers)
    # Three matrices of bfloat16 numbers.
    slot = 3 * MOE["hidden_size"] * MOE["moe_intermediate_size"] * 2
    assert plan["slot_bytes"] == slot
    weights = memfit("estimate", path, "--json").json["components"]["weights"]
    assert weights["by_part"]["experts"] == plan["all_expert_bytes"] == layers * 16 * slot


def test_packed_experts_are_planned(memfit: Memfit, tmp_path: Path) -> None:
    block = {"bits": 4, "group_size": 32}
    packed = write_config(tmp_path / "packed", {**MOE, "quantization": block})
    plain = write_config(tmp_path / "plain", MOE)
    arguments = ("plan", "experts", "--memory", "16GB", "--json")
    as_declared = memfit(*arguments, packed).json
    converted = memfit(*arguments, plain, "--quantize", "4", "--group-size", "32").json
    assert as_declared["slot_bytes"] == converted["slot_bytes"]
    weights = memfit("estimate", packed, "--json").json["components"]["weights"]
    assert weights["by_part"]["experts"] == as_declared["all_expert_bytes"]


@pytest.mark.exhaustive
def test_contexts_are_planned_near_the_trace(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path, MOE)
    arguments = ("--contexts", "4k,16k", "--requests", "1,4", "--memory", "16GB", "--json")
    for cell in memfit("plan", "context", path, *arguments).json["matrix"]:
        run = ("--context", str(cell["context_tokens"]), "--batch", str(cell["requests"]))
        traced = memfit("estimate", path, *run, "--json").json
        error = traced["components"]["workspace"]["bytes"] // 4
        need = traced["peak_bytes"] + traced["components"]["margin"]["bytes"]
        assert abs(cell["needed_bytes"] - need) <= error


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "offload", "--memory", "16GB"),
        ("plan", "growth", "--memory", "16GB"),
        ("plan", "static", "--context", "64"),
        ("compare", "--memory", "16GB", "--matrix", "context=1k,2k"),
        ("estimate", "--runtime", "mlx-swift-lm", "--memory", "16GB"),
        ("estimate", "--runtime", "mlx-moe", "--memory", "16GB"),
        ("estimate", "--runtime", "foundry", "--memory", "16GB"),
        ("estimate", "--plot", "--memory", "16GB"),
    ],
    ids=" ".join,
)
def test_other_commands_answer(memfit: Memfit, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    run = memfit(*arguments, write_config(tmp_path, MOE), "--json")
    assert run.code == 0, run.err
    assert "by formula" not in run.out


@pytest.mark.exhaustive
def test_a_class_that_is_not_converted_is_trained_as_it_is(memfit: Memfit, tmp_path: Path) -> None:
    config = next(case for case in CASES if case["model_type"] == "afm7")
    path, recipe = write_config(tmp_path, config), ("--num-layers", "1", "--max-seq-length", "128")
    # Its layers do not take the mode that mlx's quantize passes to them.
    assert "mode" in memfit("estimate", path, "--quantize", "4").err
    knobs = memfit("plan", "train", path, *recipe, "--json").json["knobs"]
    assert knobs
    assert not any("weight_bits" in knob["settings"] for knob in knobs)


@pytest.mark.exhaustive
def test_unequal_machines_get_a_split(memfit: Memfit, tmp_path: Path) -> None:
    large = {**MOE, "num_hidden_layers": 12, "moe_intermediate_size": 2048, "n_routed_experts": 64}
    path = write_config(tmp_path, large)
    devices = ("--device", "m4-pro-24,m4-max-64", "--parallel", "pipeline", "--json")

    def room(ranks: list[dict[str, int]]) -> int:
        return min(rank["working_set_bytes"] - rank["needed_bytes"] for rank in ranks)

    other = memfit("estimate", path, *devices).json["ranks"]["other"]
    small, big = other["split"]
    assert small + big == 12
    third = memfit("estimate", path, *devices, "--split", f"{small + 3},{big - 3}").json["ranks"]
    # The workspace of a rank is not known before it is traced.
    assert room(other["ranks"]) > room(third["ranks"])


def test_a_page_says_why_it_has_no_sliders(memfit: Memfit, tmp_path: Path) -> None:
    run = memfit("estimate", write_config(tmp_path, MOE), "--memory", "16GB", "--format", "html")
    assert "Other settings cannot be tried here" in run.out
    assert "<script" not in run.out


@pytest.mark.exhaustive
def test_the_gate_judges_and_remedies(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path / "model", MOE)
    limits = {"peak": "60MB", "context": "8k", "expert_capacity": 8}
    write_policy(tmp_path, it=target(limits))
    monkeypatch.chdir(tmp_path)
    report = memfit("gate", "--format", "json").json["targets"][0]
    passed = {check["limit"]: check["passed"] for check in report["checks"]}
    assert passed == {"peak": False, "context": True, "expert_capacity": True}


@pytest.mark.parametrize("runtime", ["zinc", "llama.cpp", "vllm"])
def test_a_runtime_with_layers_of_its_own_is_refused(
    memfit: Memfit, tmp_path: Path, runtime: str
) -> None:
    run = memfit("estimate", write_config(tmp_path, MOE), "--runtime", runtime)
    assert (run.code, run.err.count("\n")) == (3, 1)


def test_a_key_that_no_family_reads_is_left_to_the_class(memfit: Memfit, tmp_path: Path) -> None:
    path = write_config(tmp_path / "other", {**SMALL, "num_memory_layers": 4})
    data = memfit("estimate", path, "--json").json
    assert data["method"] == "trace"
    [note] = [note for note in data["notes"] if note["code"] == "own-class"]
    assert note["level"] == "warning"
    assert "num_memory_layers" in note["message"]
    assert "num_memory_layers" in memfit("estimate", path).out
    plain = write_config(tmp_path / "plain", SMALL)
    known = memfit("estimate", plain, "--method", "trace", "--json").json["components"]
    assert data["components"] == {**known, "weights": {**known["weights"], "basis": "traced"}}


@pytest.mark.exhaustive(daily=True)
def test_other_weights_are_between_traces_of_the_converted_class(
    memfit: Memfit, tmp_path: Path
) -> None:
    path = write_config(tmp_path, MOE)
    arguments = ("estimate", path, "--context", "600", "--prefill-step", "128", "--json")
    needed = memfit(*arguments, "--margin", "0").json["needed_bytes"]
    machine = ("--margin", "0", "--working-set", f"{needed - 1}B")
    found = memfit(*arguments, *machine).json
    advice = found["recommendation"]["weight_bits"]
    assert advice["state"] == "change"
    assert "between traced prompts" in advice["reason"]
    chosen = next(each for each in found["actions"] if each["verdict"] == "fits")
    bits = chosen["settings"]["weight_bits"]
    real = memfit(*arguments, *machine, "--quantize", str(bits)).json
    assert real["verdict"] == "fits"
    assert real["needed_bytes"] <= chosen["needed_bytes"] <= real["needed_bytes"] * 11 // 10
