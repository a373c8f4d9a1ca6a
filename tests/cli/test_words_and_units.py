"""Every screen has the same words and units for the same things."""

import re

import pytest

from tests.cli.running import Memfit
from tests.cli.test_pages import COMMANDS, SMALL
from tests.selection import quick

SCREENS = {**COMMANDS, "verbose": f"estimate {SMALL} --memory 8GB --context 32k -v"}


def text_of(memfit: Memfit, command: str) -> str:
    run = memfit(*command.split())
    assert run.code in (0, 1), run.err
    return " ".join(run.out.split())


@pytest.mark.parametrize("name", quick(SCREENS, ("estimate", "verbose", "server", "context")))
def test_a_screen_has_gigabytes_with_one_decimal_and_macs_as_they_are_sold(
    memfit: Memfit, name: str
) -> None:
    text = text_of(memfit, SCREENS[name])
    assert re.findall(r"[0-9]\.[0-9]{2,} [GT]i?B", text) == []
    assert re.findall(r"Mac with [0-9.]+ GiB|[0-9] GiB of memory|[0-9] GiB memory", text) == []


def test_one_need_has_one_number_in_every_command(memfit: Memfit) -> None:
    """Rounded up, and a budget down, by each of them."""
    model = (SMALL, "--memory", "16GB")
    needed = memfit("estimate", *model, "--json").json["needed_bytes"]
    shown = f"{-(-needed // 10**8) / 10:.1f}"
    assert f"({shown} GB of 12.7 GB" in text_of(memfit, f"estimate {SMALL} --memory 16GB")
    plan = text_of(memfit, f"plan context {SMALL} --memory 16GB")
    assert f"fits: {shown} GB of a working set of 12.7 GB and 16 GB of memory" in plan
    matrix = text_of(memfit, f"compare {SMALL} --memory 16GB --matrix context=4k")
    assert f"fits {shown} GB" in matrix


@pytest.mark.exhaustive(daily=True)
def test_needs_is_the_peak_with_the_margin_where_a_verdict_is_about_it(memfit: Memfit) -> None:
    fits = memfit("fits", "--memory", "8GB")
    assert "needs GB" in fits.out
    assert "peak GB" not in fits.out
    rows = memfit("fits", "--memory", "8GB", "--json").json["models"]
    for row in rows[:3]:
        assert f"{-(-row['needed_bytes'] // 10**8) / 10:.1f}" in fits.out
    server = memfit(*COMMANDS["server"].split()).out
    assert re.search(r"^Needs +[0-9.]+ GB", server, re.MULTILINE)
    assert "Peak" not in server


@pytest.mark.parametrize("command", ["fits", f"plan context {SMALL}", f"compare {SMALL} {SMALL}"])
def test_a_screen_has_the_macos_and_the_reply(memfit: Memfit, command: str) -> None:
    text = text_of(memfit, f"{command} --memory 32GB")
    assert "26.8 GB on macOS 26" in text
    assert ", no reply" in text


def test_a_gate_shows_equal_figures_as_equal_and_near_ones_apart() -> None:
    """A limit decides by the byte: one decimal would show 16.0 GB of at most 16.0 GB as broken."""
    from memfit.cli.render.views.gate import _amount

    assert _amount(16_000_400_000, "bytes") == _amount(16_000_400_000, "bytes") == "16.000 GB"
    assert _amount(16_001_000_000, "bytes") == "16.001 GB"
