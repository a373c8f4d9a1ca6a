"""What is proposed for a model type that nothing describes, and what an assumed type prints."""

from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.likeness import like
from memfit.estimators.arch.registry import FAMILIES
from tests.cli.running import Memfit
from tests.models import QWEN3_4B, QWEN3_NEXT_80B, sample_config, write_checkpoint, write_config

KINDS = ("qwen3_mtp", "qwen3_assistant", "qwen3_eagle3", "qwen3_dflash", "bert", "qwen3_tts")
LLAMA = sample_config("llama-3.1-8b")
# Linear attention and sparse attention: mlx_vlm 0.7.10, models/glm5_next/config.py.
GLM5_NEXT = {
    **sample_config("glm-5.1"),
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    "index_kpool": 16,
    "index_topk_freq": 1,
    "hc_mult": 4,
}
UNHEARD = "unheard_of"
DISTINCTIVE = (
    *("deepseek-v2-lite", "deepseek-v3.2", "falcon-h1-7b", "gemma-2-2b", "gemma-3-4b"),
    *("gemma-3n-e4b", "gpt-oss-20b", "granite-4.0-h-tiny", "jamba-1.5-mini", "lfm2-1.2b"),
    *("kimi-linear-48b-a3b-4bit", "llama-4-scout", "mamba-2.8b", "mimo-v2-flash"),
    *("nemotron-3-nano-30b-a3b", "qwen3-30b-a3b-4bit", "qwen3.5-27b", "recurrentgemma-2b"),
)


def asked(memfit: Memfit, directory: Path, config: dict[str, Any]) -> str:
    """What memfit says of a config that it does not describe."""
    run = memfit("estimate", write_config(directory, config), "--memory", "32GB")
    assert (run.code, run.out) == (3, "")
    return run.err


@pytest.mark.parametrize("kind", KINDS)
def test_no_family_is_proposed_for_what_generates_no_text(
    kind: str, tmp_path: Path, memfit: Memfit
) -> None:
    config = {**QWEN3_4B, "model_type": kind, "architectures": ["Other"]}
    assert "--as" not in asked(memfit, tmp_path, config)


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": 32000},
        {"target_layer_ids": [1, 8, 15]},
        {"block_size": 3},
        {"num_hidden_layers": 1},
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["NewForMaskedLM"]},
    ],
)
def test_a_drafter_or_an_encoder_is_known_by_its_config(
    changes: dict[str, Any], tmp_path: Path, memfit: Memfit
) -> None:
    assert "--as" not in asked(memfit, tmp_path, {**LLAMA, "model_type": UNHEARD, **changes})


def test_a_drafter_of_a_described_type_is_no_model_of_it(tmp_path: Path, memfit: Memfit) -> None:
    config = write_config(tmp_path, {**LLAMA, "draft_vocab_size": 32000})
    run = memfit("estimate", config, "--method", "formula")
    assert (run.code, "--as" in run.err) == (3, False)


def test_no_family_is_proposed_for_a_checkpoint_without_an_embedding(
    tmp_path: Path, memfit: Memfit
) -> None:
    tensors = {"layers.0.input_layernorm.weight": ("BF16", (2560,))}
    path = write_checkpoint(tmp_path, {**QWEN3_4B, "model_type": "qwen9"}, tensors)
    assert "--as" not in memfit("estimate", path, "--memory", "32GB").err


@pytest.mark.parametrize("name", DISTINCTIVE)
def test_a_config_is_like_its_own_family_whatever_its_name(name: str) -> None:
    config = sample_config(name)
    proposed = like({**config, "model_type": UNHEARD})
    assert FAMILIES[proposed] == FAMILIES[config["model_type"]]


def test_generic_keys_are_like_llama_and_a_name_decides_only_between_equals() -> None:
    assert like({**LLAMA, "model_type": UNHEARD}) == "llama"
    assert like({**QWEN3_4B, "model_type": "qwen9"}) == "qwen3"
    # Of a hybrid with linear attention the name of a dense family says nothing.
    assert like({**QWEN3_NEXT_80B, "model_type": "llama5"}) in ("qwen3_5", "qwen3_next")


@pytest.mark.parametrize(
    "config",
    [
        {**GLM5_NEXT, "model_type": "glm6_next"},
        {**LLAMA, "model_type": "llama5", "num_memory_layers": 4},
        {**LLAMA, "model_type": "llama5", "vision_config": {"depth": 27}},
        {"model_type": "llama5", "text_config": LLAMA, "vision_config": {"depth": 27}},
        {"model_type": "llama5", "text_config": LLAMA, "talker_config": {"num_layers": 2}},
        {"model_type": "llama5", "hidden_size": 4096, "num_hidden_layers": 32},
        {"model_type": "llama5"},
    ],
)
def test_nothing_is_proposed_for_structure_that_no_family_reads(
    config: dict[str, Any], tmp_path: Path, memfit: Memfit
) -> None:
    assert "--as" not in asked(memfit, tmp_path, config)


def test_an_assumed_type_prints_no_command(tmp_path: Path, memfit: Memfit) -> None:
    path = write_config(tmp_path, {**QWEN3_4B, "model_type": "qwen4", "architectures": ["Other"]})
    run = memfit("estimate", path, "--as", "qwen3", "--memory", "32GB", "--json")
    assert run.code == 0
    assert run.json["actions"]
    assert not any(action["commands"] for action in run.json["actions"])
    assert "mlx_lm." not in memfit("estimate", path, "--as", "qwen3", "--memory", "32GB").out


ASSUMABLE = ("estimate", "plan server", "plan context", "compare --model qwen3-4b-4bit --model")


@pytest.mark.parametrize("form", ["table", "json", "markdown", "html"])
@pytest.mark.parametrize("command", ASSUMABLE)
def test_no_command_prints_a_server_of_an_assumed_type(
    command: str, form: str, tmp_path: Path, memfit: Memfit
) -> None:
    path = write_config(tmp_path, {**QWEN3_4B, "model_type": "qwen9"})
    load = ("--clients", 12, "--max-tokens", 100) if command == "plan server" else ()
    options = (*load, "--as", "qwen3", "--memory", "32GB", "--format", form)
    text = memfit(*command.split(), path, *options).out
    assert "qwen3" in text
    assert "for 1 client" not in text
    assert "--model" not in text
    assert "mlx_lm.generate" not in text


@pytest.mark.parametrize("command", ["gate", "fits", "plan ranks", "tune", "plan train"])
def test_other_commands_assume_no_type(command: str, tmp_path: Path, memfit: Memfit) -> None:
    path = write_config(tmp_path, {**QWEN3_4B, "model_type": "qwen9"})
    run = memfit(*command.split(), path, "--as", "qwen3", "--memory", "32GB")
    assert (run.code, run.out) == (2, "")
