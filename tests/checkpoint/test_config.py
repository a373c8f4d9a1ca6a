"""config.json: valid configs are read, all others give a clear error."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import CheckpointError, ConfigError, InputError
from memfit.estimators.base.reading.strict_json import MAX_NESTING
from memfit.estimators.checkpoint.config import (
    MAX_CONFIG_BYTES,
    MAX_CONFIG_VALUES,
    read_config,
    read_model_config,
)


def error_of(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{path}: ")


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "the file is not JSON at character 0"),
        (b"[]", "the file is not a JSON object"),
        (b'"text"', "the file is not a JSON object"),
        (b"\xff", "the file is not UTF-8 at byte 0"),
        (b'{"a": 1, "a": 1}', "the file has the name 'a' twice"),
        (b'{"a": {"b": 1, "b": 2}}', "the file has the name 'b' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the file has a number of thousands of digits"),
        (b'{"a": ' + b"9" * 4301 + b"}", "the file has a number of thousands of digits"),
        (b'{"a": [' + b"9" * 40 + b"]}", "a[0]: an integer of 133 bits is too large"),
        (b'{"a": {"b": NaN}}', "a.b: expected a number, got NaN"),
        (b'{"a": ' + b"[" * 100_000, "the file is nested too deeply"),
        (b'{"a": [' + b"[]," * MAX_CONFIG_VALUES + b"1]}", "the file has more than 200000 values"),
        (b'{"a": ["\\ud800"]}', "a[0]: '\\ud800' is not valid Unicode"),
        (b'{"\\ud800": 1}', "'\\ud800' is not valid Unicode"),
    ],
)
def test_a_file_that_is_not_a_config_is_rejected(tmp_path: Path, text: bytes, fault: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    assert error_of(path).startswith(fault)


def test_nesting_depth_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(nested(MAX_NESTING))
    assert read_config(path)
    path.write_text(nested(MAX_NESTING + 1))
    assert error_of(path).endswith("nested deeper than 64 levels")


def test_a_large_file_is_rejected_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    assert error_of(path) == "6000001 bytes; such a file may have at most 6000000"


def test_a_missing_config_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_config(tmp_path / "config.json")


def test_infinite_numbers_are_tagged_as_in_newer_transformers(tmp_path: Path) -> None:
    # Configs of Mamba-2 and Nemotron-H hold "time_step_limit": [0.0, Infinity].
    path = tmp_path / "config.json"
    path.write_text('{"limit": [0.0, Infinity, -Infinity, 1e999, {"__float__": "Infinity"}]}')
    infinite = {"__float__": "Infinity"}
    assert read_config(path) == {
        "limit": [0.0, infinite, {"__float__": "-Infinity"}, infinite, infinite]
    }


def test_an_unusable_number_is_reported_when_its_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 10**30}))
    assert read_config(path) == {"num_hidden_layers": 10**30}


@pytest.mark.parametrize(
    "config", [{"quantization_config": {"own": 1}}, {"text_config": {"quantization_config": {}}}]
)
def test_quantisation_in_the_config_overrides_modelopts_file(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text("not even JSON")
    assert read_model_config(tmp_path / "config.json") == config


@pytest.mark.parametrize("config", [{}, {"text_config": {}}, {"text_config": 1}])
def test_modelopts_quantisation_file_is_read(tmp_path: Path, config: dict[str, Any]) -> None:
    quantisation = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantisation))
    found = read_model_config(tmp_path / "config.json")
    assert found == {**config, "quantization_config": quantisation}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=4), values),
    max_leaves=20,
)


@given(JSON)
def test_arbitrary_json_is_a_config_or_gives_a_one_line_error(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.json"
    path.write_text(json.dumps(value))
    config, message = None, "none"
    try:
        config = read_config(path)
    except ConfigError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    if config is not None:
        json.dumps(config, allow_nan=False).encode("utf-8")


@given(st.binary())
def test_arbitrary_bytes_never_raise_another_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(b'{"a": ' + content + b"}")
    try:
        found = read_config(path)
    except ConfigError:
        return
    assert found["a"] == json.loads(path.read_bytes())["a"]
