"""What was assumed and changes the answer is on the first screen."""

import pytest
from msgspec.structs import replace

from memfit.estimators.machine.device import FREE_NOW, PROCESS_BYTES, as_it_is_now, free_bytes
from memfit.estimators.machine.devices import find_device
from memfit.estimators.machine.host import detect_host
from tests.cli.running import Memfit

MAC = replace(find_device("m2-max-32"), source="detected", used_by_others_bytes=12 * 10**9)


def screen(memfit: Memfit, *arguments: str) -> str:
    return " ".join(memfit("estimate", *arguments).out.split())


def test_the_host_has_what_is_free_now_less_a_margin() -> None:
    now = as_it_is_now(MAC)
    assert now.working_set_bytes == MAC.memory_bytes - 12 * 10**9 - PROCESS_BYTES
    assert now.budget == FREE_NOW
    # The working set is less than what is free.
    idle = replace(MAC, used_by_others_bytes=10**9)
    assert as_it_is_now(idle) == idle
    full = as_it_is_now(replace(MAC, used_by_others_bytes=MAC.memory_bytes))
    assert (free_bytes(full), full.working_set_bytes) == (0, 1)


def test_device_host_says_that_it_takes_what_is_free(memfit: Memfit) -> None:
    host = detect_host()
    if host is None or host.used_by_others_bytes is None or host.backend != "cpu":
        pytest.skip("what is in use is not known here, or is that of a GPU")
    result = memfit("estimate", "qwen3-0.6b", "--device", "host", "--json").json["device"]
    most = host.memory_bytes - PROCESS_BYTES
    assert result["budget"] == FREE_NOW
    assert 0 < result["working_set_bytes"] <= most - host.used_by_others_bytes // 2
    text = screen(memfit, "qwen3-0.6b", "--device", "host")
    assert "free now" in text
    assert "are in use" in text


def test_the_screen_has_the_macos_and_the_figure_of_the_other(memfit: Memfit) -> None:
    new = screen(memfit, "qwen3-8b-4bit", "--memory", "32")
    assert "GPU 26.8 GB on macOS 26, 22.9 on 15" in new
    old = screen(memfit, "qwen3-8b-4bit", "--memory", "32", "--os-regime", "macos-15")
    assert "GPU 22.9 GB on macOS 13-15, 26.8 on 26" in old
    # No M5 runs macOS 15.
    newest = screen(memfit, "qwen3-8b-4bit", "--device", "m5-max-36")
    assert "GPU 30.1 GB on macOS 26" in newest
    assert "on 15" not in newest


def test_the_screen_has_the_length_of_the_reply(memfit: Memfit) -> None:
    assert "4096 tokens, no reply," in screen(memfit, "qwen3-8b-4bit", "--memory", "32")
    replied = ("qwen3-8b-4bit", "--memory", "32", "--prompt-tokens", "4k", "--max-tokens", "1k")
    assert "4096 tokens + 1024 generated," in screen(memfit, *replied)


@pytest.mark.parametrize(
    ("version", "verdict", "other"),
    [("0.32.4", "fits", "On MLX 0.32.0 it does not fit"), ("0.32.0", "does not fit", "it fits")],
)
def test_line_one_says_where_another_mlx_reverses_the_verdict(
    memfit: Memfit, version: str, verdict: str, other: str
) -> None:
    question = ("qwen3.6-27b", "--quantize", "4", "--device", "m5-max-36", "--context", "128k")
    text = screen(memfit, *question, "--mlx-version", version)
    first = text.partition("131072 tokens")[0]
    assert verdict in first
    assert other in first
    assert "Nothing to change" not in first
