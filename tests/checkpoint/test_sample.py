"""Samples: YAML with the same values as JSON."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import ConfigError, InputError
from memfit.estimators.checkpoint.local.samples import MAX_SAMPLE_BYTES, Sample, read_sample

HEAD = "schema: memfit.sample/1\nname: small\nsource: made up for this test\n"


def read(directory: Path, text: str | bytes) -> Sample:
    path = directory / "sample.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_sample(path)


def error_of(directory: Path, text: str | bytes) -> str:
    with pytest.raises(InputError) as caught:
        read(directory, text)
    message = str(caught.value)
    assert message.startswith(f"{directory / 'sample.yaml'}: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{directory / 'sample.yaml'}: ")


def test_a_sample_has_a_config_and_expected_figures(tmp_path: Path) -> None:
    config = "config: {model_type: llama, hidden_size: 64}\nexpected: {weight_bytes: 4096}\n"
    assert read(tmp_path, HEAD + config) == Sample(
        name="small",
        source="made up for this test",
        config={"model_type": "llama", "hidden_size": 64},
        expected={"weight_bytes": 4096},
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-12", -12),
        ("0.5", 0.5),
        ("1e999", {"__float__": "Infinity"}),
        ("true", True),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("'12'", "12"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("[1, [2]]", [1, [2]]),
    ],
)
def test_plain_yaml_values_have_the_meaning_of_a_config(
    tmp_path: Path, text: str, value: object
) -> None:
    assert read(tmp_path, f"{HEAD}config:\n  key: {text}\n").config == {"key": value}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected a mapping"),
        ("- 1", "expected a mapping"),
        ("a: [", "is not YAML at line "),
        ("a: \0", "is not YAML: a character that YAML forbids"),
        (b"\xff", "is not UTF-8 at byte 0"),
        ("a: &x 1", "line 1: anchors and aliases are not read"),
        ("a: *x", "line 1: anchors and aliases are not read"),
        ("a: !!python/object/apply:os.getcwd []", "line 1: tags are not read"),
        ("a: !!int '0x'", "line 1: tags are not read"),
        ("a: 1\na: 2", "line 2: the name 'a' is given twice"),
        ("1: a", "line 1: a key is not a string"),
        ("[a]: b", "line 1: a key is not a string"),
        ("a: 1\n---\nb: 2", "line 2: a second document begins"),
        ("a: " + "[" * 65, "line 1: nested deeper than 64 levels"),
        ("a: " + "9" * 5000, "line 1: a value of more than 4096 characters"),
        ("a: " + "9" * 4000, "a: an integer of 13288 bits is too large"),
        ("schema: memfit.sample/2", "schema: expected memfit.sample/1"),
        ("schema: 1", "schema: expected memfit.sample/1"),
        ("schema: memfit.sample/1", "name: missing"),
        (HEAD, "config: missing"),
        (HEAD + "config: []", "config: expected a mapping"),
        (HEAD + "config: {}\nexpected: 1", "expected: expected a mapping"),
        (HEAD + "config: {}\nextra: 1", "extra: unknown key"),
        (HEAD.replace("small", "''") + "config: {}", "name: expected a string"),
        (HEAD.replace("small", "7") + "config: {}", "name: expected a string"),
    ],
)
def test_a_file_that_is_not_a_sample_is_rejected(
    tmp_path: Path, text: str | bytes, fault: str
) -> None:
    assert error_of(tmp_path, text).startswith(fault)


def test_a_large_sample_is_rejected_before_reading(tmp_path: Path) -> None:
    assert "at most 1000000" in error_of(tmp_path, b"#" * (MAX_SAMPLE_BYTES + 1))


@given(st.text(max_size=60) | st.text("[]{}&*!|>-:?,'\"#%@ \nab01", max_size=60))
def test_arbitrary_yaml_is_a_sample_or_gives_a_one_line_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    message = "none"
    try:
        found = read(tmp_path_factory.getbasetemp(), f"{HEAD}config:\n  key: {text}\n".encode())
        assert set(found.config) >= {"key"}
    except ConfigError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
