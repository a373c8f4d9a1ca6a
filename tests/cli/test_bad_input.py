"""Bad input: one line on standard error, the right exit code, no traceback and no new file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Memfit, Run
from tests.models import QWEN3_4B, QWEN3_NEXT_80B, write_config


def assert_one_line(run: Run, code: int, *words: str) -> None:
    assert run.code == code, run.err
    assert run.out == "" or run.json["exit_code"] == code
    # A slow machine also reports what it is doing.
    lines = [line for line in run.err.splitlines() if not line.endswith(" s so far")]
    assert lines[0].startswith("memfit: ")
    assert len(lines) == 1
    assert "Traceback" not in run.err
    for word in words:
        assert word in run.err


def test_a_missing_path_is_reported(memfit: Memfit) -> None:
    assert_one_line(memfit("estimate", "./nowhere"), 2, "./nowhere", "no such path")


def test_an_empty_name_is_reported(memfit: Memfit) -> None:
    assert_one_line(memfit("estimate", ""), 2, "no such path")


def test_a_directory_without_config_is_reported(memfit: Memfit, tmp_path: Path) -> None:
    assert_one_line(memfit("estimate", tmp_path), 2, "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"model_type": "qwen3"', "\xff{}", "nul"])
def test_a_config_that_is_not_a_json_object_is_reported(
    memfit: Memfit, tmp_path: Path, text: str
) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(text.encode("latin-1"))
    output = tmp_path / "out.json"
    assert_one_line(memfit("estimate", config, "-o", output), 2, "config.json")
    assert not output.exists()


@pytest.mark.parametrize("value", ["36", -1, 0, 36.0, True, 10**30, [], {}, "\n\x1b[31m"])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "head_dim"])
def test_an_invalid_count_in_a_config_is_reported(
    memfit: Memfit, tmp_path: Path, key: str, value: Any
) -> None:
    directory = write_config(tmp_path, {**QWEN3_4B, key: value})
    run = memfit("estimate", directory)
    assert_one_line(run, 2, "config.json", key)
    assert "\x1b" not in run.err


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_key_is_reported(memfit: Memfit, tmp_path: Path, key: str) -> None:
    config = {k: v for k, v in QWEN3_4B.items() if k != key}
    assert_one_line(memfit("estimate", write_config(tmp_path, config)), 2, key)


def test_heads_that_groups_do_not_divide_are_reported(memfit: Memfit, tmp_path: Path) -> None:
    directory = write_config(tmp_path, {**QWEN3_4B, "num_key_value_heads": 7})
    assert_one_line(memfit("estimate", directory), 2, "num_key_value_heads")


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])  # qwen3's class does not look at them
def test_layer_types_shorter_than_the_layers_are_reported(
    memfit: Memfit, tmp_path: Path, model_type: str
) -> None:
    config = {**QWEN3_4B, "model_type": model_type, "layer_types": ["full_attention"] * 35}
    assert_one_line(memfit("estimate", write_config(tmp_path, config)), 2, "layer_types")


def test_an_unknown_model_type_gives_a_suggestion(memfit: Memfit, tmp_path: Path) -> None:
    directory = write_config(tmp_path, {**QWEN3_4B, "model_type": "qwen3x"})
    run = memfit("estimate", directory)
    assert (run.code, "'qwen3x' is not described" in run.err) == (3, True)
    assert "--as qwen3 (an assumption)" in run.err


def test_an_unread_structural_key_is_reported(memfit: Memfit, tmp_path: Path) -> None:
    directory = write_config(tmp_path, {**QWEN3_4B, "num_memory_layers": 4})
    run = memfit("estimate", directory, "--method", "formula")
    assert (run.code, "num_memory_layers: looks structural" in run.err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--context", "many"), "--context"),
        (("--context", "4k", "--max-tokens", "3"), "--context"),
        (("--context", "0"), "prompt tokens"),
        (("--batch", "0"), "batch"),
        (("--prefill-step", "0"), "prefill step"),
        (("--kv-bits", "7"), "KV bits"),
        (("--kv-bits", "8", "--kv-group-size", "48"), "KV group size"),
        (("--max-kv-size", "2"), "max KV size"),
        (("--memory", "64X"), "--memory"),
        (("--memory", "64GB", "--device", "m4-max-64"), "--device"),
        (("--device", "m9-max-64"), "m9-max-64"),
        (("--device", "m4-max-65"), "m4-max-65"),
        (("--runtime", "other"), "other"),
        (("--quantize", "7"), "7 bits"),
        (("--quantize", "4", "--group-size", "0"), "groups of 0"),
        (("--quantize", "4", "--quant-mode", "int4"), "int4"),
        (("--group-size", "64"), "--quantize"),
        (("--margin", "-1"), "--margin"),
        (("--draft", "./nowhere"), "nowhere"),
        (("--adapter", "nowhere"), "nowhere"),
        (("-o", f"{__file__}/out"), f"{__file__}/out"),
    ],
)
def test_bad_options_are_reported(
    memfit: Memfit, tmp_path: Path, arguments: tuple[str, ...], word: str
) -> None:
    assert_one_line(memfit("estimate", write_config(tmp_path, QWEN3_4B), *arguments), 2, word)


def test_kv_bits_on_heads_the_group_does_not_divide_are_rejected(
    memfit: Memfit, tmp_path: Path
) -> None:
    directory = write_config(tmp_path, {**QWEN3_4B, "head_dim": 80})
    run = memfit("estimate", directory, "--kv-bits", "8", "--context", "8k")
    assert_one_line(run, 3, "KV group size")


def test_kv_bits_on_a_model_that_cannot_use_them_are_rejected(
    memfit: Memfit, tmp_path: Path
) -> None:
    directory = write_config(tmp_path, {**QWEN3_4B, "model_type": "gemma2"})
    run = memfit("estimate", directory, "--kv-bits", "8", "--context", "8k")
    assert_one_line(run, 3, "gemma2", "KV bits")


def test_a_huge_model_is_estimated_without_much_memory(memfit: Memfit, tmp_path: Path) -> None:
    config = {**QWEN3_NEXT_80B, "num_hidden_layers": 4096, "num_experts": 2**40}
    run = memfit("estimate", write_config(tmp_path, config), "--json")
    assert json.loads(run.out)["components"]["weights"]["bytes"] > 2**60


@pytest.mark.parametrize("form", ["table", "json", "markdown"])
@pytest.mark.parametrize(
    "command", ["estimate", "compare", "tune", "plan request --used 1 --requested 1 --capacity 9"]
)
def test_two_output_formats_are_rejected_in_either_order(
    memfit: Memfit, command: str, form: str
) -> None:
    model = [] if command.startswith("plan") else ["model"]
    for options in (["--json", "--format", form], ["--format", form, "--json"]):
        run = memfit(*command.split(), *model, *options)
        assert_one_line(run, 2, "--json", "--format", "one of them")


@pytest.mark.parametrize("options", [("--json",), ("--format", "json"), ("--format=json",)])
def test_an_error_is_json_on_standard_output_where_json_was_requested(
    memfit: Memfit, options: tuple[str, ...]
) -> None:
    run = memfit("estimate", "no/such/path", *options)
    assert run.err.startswith("memfit: 'no/such/path': no such path; ")
    assert (run.json["slug"], run.json["exit_code"]) == ("bad-checkpoint", run.code)
    assert run.err == f"memfit: {run.json['message']}\n"
    assert run.json["message"].endswith(run.json["fix"])
    wrong = memfit("estimate", "--no-such-option", *options)
    assert (wrong.json["slug"], wrong.code) == ("bad-input", 2)
    assert "--no-such-option" in wrong.err
    assert memfit("estimate", "no/such/path").out == ""


@pytest.mark.parametrize(
    ("arguments", "is_json"),
    [
        (("estimate", "a --format json"), False),
        (("estimate", "a=--format=json"), False),
        (("estimate", "--", "--json"), False),
        (("estimate", "a", "--format", "json"), True),
        (("estimate", "a", "--format=json"), True),
        (("estimate", "a", "--json"), True),
    ],
)
def test_errors_are_json_where_an_option_asks_for_it(
    memfit: Memfit, arguments: tuple[str, ...], is_json: bool
) -> None:
    run = memfit(*arguments)
    assert run.code == 2
    assert run.out.startswith("{") == is_json


@pytest.mark.parametrize("bits", ["4", "4bit", "mxfp4"])
def test_q_takes_bits_as_quantize_does(memfit: Memfit, bits: str) -> None:
    short = memfit("estimate", "qwen3-0.6b", "-q", bits, "--json").json
    assert short == memfit("estimate", "qwen3-0.6b", "--quantize", bits, "--json").json
    default = memfit("estimate", "-q", "qwen3-0.6b", "--json").json
    assert default["components"]["weights"]["resident_bytes"] < 4 * 10**8
