"""YAML with the line of each value, so that a later error can state it."""

from pathlib import Path

import pytest

from memfit.estimators.base.errors import ConfigError
from memfit.estimators.base.reading.strict_yaml import MAX_EVENTS, parse_document, parse_placed

NESTED = b"""\
# a comment
first: 1
list:
  - a
  - deeper:
      key:
        value
"""


def test_every_value_has_the_line_of_its_key() -> None:
    placed = parse_placed(NESTED, Path("p.yaml"))
    assert placed.value == {"first": 1, "list": ["a", {"deeper": {"key": "value"}}]}
    assert placed.lines == {
        (): 2,
        ("first",): 2,
        ("list",): 3,
        ("list", 0): 4,
        ("list", 1): 5,
        ("list", 1, "deeper"): 5,
        ("list", 1, "deeper", "key"): 6,
    }


def test_repeated_names_are_returned_with_their_lines_and_the_first_value_stays() -> None:
    placed = parse_placed(b"a: 1\nb: {c: 1, c: 2}\na: 3\n", Path("p.yaml"))
    assert placed.value == {"a": 1, "b": {"c": 1}}
    assert placed.repeated == ((2, ("b", "c")), (3, ("a",)))
    with pytest.raises(ConfigError, match="line 2: the name 'c' is given twice"):
        parse_document(b"a: 1\nb: {c: 1, c: 2}\na: 3\n", Path("p.yaml"))


@pytest.mark.parametrize("text", [b"*a: 1", b"&a b: 1", b"!t b: 1", b"? [a]\n: 1"])
def test_a_key_follows_the_same_rules_as_a_value(text: bytes) -> None:
    with pytest.raises(ConfigError, match="line 1: "):
        parse_placed(text, Path("p.yaml"))


def test_too_many_values_are_rejected(tmp_path: Path) -> None:
    text = b"a: [" + b"1," * MAX_EVENTS + b"1]"
    with pytest.raises(ConfigError, match=f"line 1: more than {MAX_EVENTS} values"):
        parse_document(text, tmp_path / "a.yaml")
