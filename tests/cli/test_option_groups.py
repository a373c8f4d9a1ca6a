"""Groups of options become flat options of a command, and its --help shows the groups."""

import inspect
import re
from typing import Annotated

import pytest

from memfit.cli.app import Commands
from memfit.cli.command_groups import SHARED_PANELS, GroupedCommand
from memfit.cli.options.groups import Only, OptionGroup, argument, grouped, option
from memfit.estimators.base.units import parse_count
from tests.cli.running import Memfit
from tests.cli.test_command_groups import listed


class Colours(OptionGroup, frozen=True, kw_only=True):
    """Two options and an argument."""

    panel = "Colour options"
    name: str = argument(default=...)
    red: int = option(help="Red.", default=1, read=parse_count)
    blue: str | None = option("--blue", "-b")


def test_a_group_becomes_parameters_and_comes_back_as_an_object() -> None:
    given: list[object] = []

    @grouped
    def paint(colours: Colours, twice: bool = False) -> None:
        given.extend([colours, twice])

    assert list(inspect.signature(paint).parameters) == ["name", "red", "blue", "twice"]
    paint(name="x", red="2k", blue=None, twice=True)
    assert given == [Colours(name="x", red=2048, blue=None), True]


def test_an_option_carries_the_heading_of_its_group() -> None:
    @grouped
    def paint(colours: Colours) -> None:
        del colours

    for parameter in inspect.signature(paint).parameters.values():
        assert parameter.default.rich_help_panel == "Colour options"


def test_an_option_that_is_not_offered_keeps_its_default() -> None:
    given: list[object] = []

    @grouped
    def paint(colours: Annotated[Colours, Only("name", "blue")]) -> None:
        given.append(colours)

    assert list(inspect.signature(paint).parameters) == ["name", "blue"]
    paint(name="x", blue="y")
    assert given == [Colours(name="x", red=1, blue="y")]


def test_an_option_that_the_group_lacks_cannot_be_offered() -> None:
    def paint(colours: Annotated[Colours, Only("name", "green")]) -> None:
        del colours

    with pytest.raises(KeyError, match="green"):
        grouped(paint)


def test_two_groups_with_the_same_option_are_refused() -> None:
    def paint(colours: Colours, red: int) -> None:
        del colours, red

    with pytest.raises(ValueError, match="duplicate parameter name: 'red'"):
        grouped(paint)


def test_help_shows_the_options_by_group(memfit: Memfit) -> None:
    lines = memfit("plan", "context", "--help-all").out.splitlines()
    assert [line for line in lines if line[:1] != " " and line.endswith(":")] == [
        "Arguments:",
        "Options:",
        "Model options:",
        "Workload options:",
        "Machine options:",
        "Runtime options:",
        "Output options:",
    ]
    own = lines.index("Options:"), lines.index("Model options:")
    assert any("--ceiling" in line for line in lines[own[0] : own[1]])


def test_the_help_of_estimate_shows_fifteen_options_and_where_the_rest_is(memfit: Memfit) -> None:
    short, whole = (memfit("estimate", each) for each in ("--help", "--help-all"))
    assert (short.code, whole.code) == (0, 0)
    shown, every = options_of(short.out), options_of(whole.out)
    assert len(shown) == 15
    assert shown < every
    assert f"\n{len(every - shown)} more options: memfit estimate --help-all\n" in short.out
    assert "MODEL  A directory" in short.out


def options_of(text: str) -> set[str]:
    """Return the options of a help text, without those that show it."""
    return {*re.findall(r"^  (-[\w-]+)", text, re.MULTILINE)} - {"-h", "--help-all"}


def test_every_help_shows_the_options_of_its_command_and_few_of_the_shared_groups(
    memfit: Memfit,
) -> None:
    long = 0
    for words, command in listed(Commands(name="memfit")):
        if not isinstance(command, GroupedCommand):
            continue
        text = memfit(*words, "--help").out
        shown = options_of(text)
        if "--help-all" not in text:
            assert len(shown) <= 15, words
            continue
        whole = memfit(*words, "--help-all").out
        sections = re.split(r"\n\n(?=\S)", whole)
        own = [options_of(each) for each in sections if not each.startswith(tuple(SHARED_PANELS))]
        assert set().union(*own) <= shown < options_of(whole), words
        long += 1
    assert long > 8


@pytest.mark.parametrize(
    ("command", "formats"),
    [
        ("estimate", "table|json|yaml|csv|markdown|html|svg"),
        ("compare", "table|json|csv|markdown|html|svg"),
        ("tune", "table|json|csv|markdown|html|svg"),
        ("plan growth", "table|json|markdown|html|svg"),
    ],
)
def test_a_command_offers_the_formats_that_it_can_write(
    memfit: Memfit, command: str, formats: str
) -> None:
    assert f"--format <{formats}>" in memfit(*command.split(), "--help-all").out
    refused = memfit(*command.split(), "--format", "xml", "model")
    assert (refused.code, "'xml' is not one of 'table', 'json'" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("command", "option", "panel"),
    [
        ("tune", "--prompt-tokens", "Workload options"),
        ("tune", "--max-tokens", "Workload options"),
        ("compare", "--model", "Model options"),
    ],
)
def test_an_option_of_one_command_stands_with_its_kind_in_help(
    memfit: Memfit, command: str, option: str, panel: str
) -> None:
    groups = memfit(command, "--help-all").out.split("\n\n")
    (found,) = (group for group in groups if f"  {option} " in group)
    assert found.startswith(f"{panel}:")
