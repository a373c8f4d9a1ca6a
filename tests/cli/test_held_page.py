"""A page and JSON say what the process holds, its seconds, and a falling schedule of steps."""

from pathlib import Path

from tests.cli.running import Memfit


def test_a_page_has_held_bytes_seconds_and_buffers(memfit: Memfit, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    turn = ("--turn", "8k+800")
    assert (
        memfit("qwen3.6-27b", "--quantize", "4", "--device", "m4-max-64", *turn, "-o", page).code
        == 0
    )
    text = page.read_text()
    for name in ("Held at most", "First token", "Whole turn", "Tokens until buffers run out"):
        assert name in text, name


def test_json_has_the_schedule_where_the_longest_prompt_takes_a_smaller_step(
    memfit: Memfit,
) -> None:
    machine = ("--device", "m4-max-64", "--context", "32k", "--json")
    schedule = memfit("qwen3-8b", "--reserve", "43GB", *machine).json["schedule"]
    steps = schedule["steps"]
    assert [step for _, step in steps] == sorted({step for _, step in steps}, reverse=True)
    assert [tokens for tokens, _ in steps] == sorted({tokens for tokens, _ in steps})
    assert schedule["context_tokens"] > schedule["context_with_first_step"]
    # One step runs the longest prompt of the model.
    assert "schedule" not in memfit("qwen3-8b", *machine).json
