"""What a new user sees first: words, narrow terminals, completions, and one line for a mistake."""

import re

import pytest

from memfit.cli.options.completion import complete_model
from tests.cli.running import Memfit

SAMPLE = "qwen3-8b-4bit"


@pytest.mark.parametrize("form", ["table", "markdown", "html"])
@pytest.mark.parametrize(
    "command",
    [
        ("estimate", SAMPLE, "--context", "1"),
        ("server", SAMPLE, "--clients", "1", "--context", "1"),
        ("plan", "context", SAMPLE),
    ],
)
def test_what_is_counted_is_singular_where_there_is_one(
    memfit: Memfit, command: tuple[str, ...], form: str
) -> None:
    out = memfit(*command, "--memory", "32GB", "--format", form).out
    assert re.search(r"(?<![\w.,])1 (token|request|client)\b", out)
    assert not re.search(r"(?<![\w.,])1 (tokens|requests|clients|prompts)\b", out)


def test_models_of_the_index_are_completed_with_and_without_their_owner() -> None:
    assert "qwen3-vl-8b-instruct" in complete_model("qwen3-vl")
    assert "Qwen/Qwen3-VL-8B-Instruct" in complete_model("Qwen/Qwen3-VL")
    assert SAMPLE in complete_model("qwen3-8b")
    assert all("/" not in name for name in complete_model(""))


@pytest.mark.parametrize("option", [("--sort", "speed"), ("--all",), ("--for=chat",)])
def test_an_option_of_the_list_with_one_model_says_so(
    memfit: Memfit, option: tuple[str, ...]
) -> None:
    run = memfit("fits", SAMPLE, *option, "--memory", "32GB")
    name = option[0].partition("=")[0]
    assert run.code == 2
    assert f"{name} is for the list of models that fit" in run.err


def test_the_prompt_of_a_pasted_line_is_not_said_to_change_no_memory(memfit: Memfit) -> None:
    line = f"mlx_lm.generate --model {SAMPLE} -p hello --system-prompt brief --temp 1"
    out = " ".join(memfit("--from", line, "--memory", "32GB").out.split())
    assert "Changes no memory: --temp " in out
    for flag in ("-p", "--system-prompt"):
        assert f"{flag}: its tokens are not counted" in out
