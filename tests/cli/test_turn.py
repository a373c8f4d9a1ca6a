"""``--turn``: a prompt and its reply, as a short form of three options."""

import pytest

from tests.cli.running import Memfit

MODEL = ("qwen3-8b-4bit", "--device", "m4-max-64")


@pytest.mark.parametrize(
    ("turn", "options"),
    [
        ("20k+800", ("--prompt-tokens", "20k", "--max-tokens", "800")),
        (
            "20k(18k cached)+800",
            ("--prompt-tokens", "20k", "--cached-tokens", "18k", "--max-tokens", "800"),
        ),
    ],
)
def test_a_turn_is_short_for_the_options_that_it_sets(
    memfit: Memfit, turn: str, options: tuple[str, ...]
) -> None:
    short = memfit(*MODEL, "--turn", turn)
    assert short.out == memfit(*MODEL, *options).out
    assert "the turn takes" in " ".join(short.out.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--turn", "20k"), "--turn: expected a prompt and a reply"),
        (("--turn", "20k(18k)+8"), "--turn: expected a prompt and a reply"),
        (("--turn", "20k+x"), "--turn: 'x' is not a count"),
        (("--turn", "2k(3k cached)+8"), "cached tokens 3072"),
        (("--turn", "2k+8", "--context", "3k"), "leave out --context"),
        (("--turn", "2k+8", "--max-tokens", "3"), "leave out --max-tokens"),
    ],
)
def test_what_is_no_turn_is_refused(memfit: Memfit, arguments: tuple[str, ...], text: str) -> None:
    result = memfit(*MODEL, *arguments)
    assert result.code == 2
    assert text in result.err
