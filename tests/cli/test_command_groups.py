"""Commands are imported when they are called; listings show each command's own summary."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from memfit.cli.app import Commands
from memfit.cli.command_groups import LazyGroup
from memfit.cli.commands.plan import Plans
from tests.cli.running import Memfit

ROOT = Path(__file__).parents[2]
GROUPS = {"commands": Commands, "commands/plan": Plans}


def listed(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every group and command, with its words."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        loaded = group.load(name) if isinstance(group, LazyGroup) else command
        yield from listed(loaded, *path, name)


def test_a_command_has_the_same_summary_in_the_list_and_in_its_help() -> None:
    for group in GROUPS.values():
        loaded = {name: group(name="memfit").load(name) for name in group.summaries}
        assert {
            name: own.get_short_help_str(limit=200).rstrip(".") for name, own in loaded.items()
        } == {name: summary.rstrip(".") for name, summary in group.summaries.items()}


@pytest.mark.parametrize("folder", GROUPS)
def test_every_module_of_a_command_is_listed(folder: str) -> None:
    found = {path.stem for path in (ROOT / "cli" / folder).iterdir()}
    group = GROUPS[folder]
    names = {re.sub("[ -]", "_", name) for name in group.summaries if name not in group.elsewhere}
    assert names == found - {"__init__", "__pycache__", "subject"}


def test_an_unknown_command_is_rejected_with_a_suggestion(memfit: Memfit) -> None:
    ran = memfit("estimat", "somewhere")
    assert ran.code == 2
    assert "No such command 'estimat'. Did you mean 'estimate'?" in ran.err


def test_an_unknown_option_is_rejected(memfit: Memfit) -> None:
    ran = memfit("estimate", "--nothing")
    assert ran.code == 2
    assert "No such option: --nothing" in ran.err


class _TwoWords(LazyGroup):
    package = "memfit.cli.commands.plan"
    summaries: ClassVar = {"static": "", "static growth": ""}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["static", "growth", "x"], "static growth"),
        (["static", "./growth", "x"], "static"),
        (["static", "--json", "growth"], "static"),
        (["static"], "static"),
    ],
)
def test_a_second_word_is_a_command_only_if_it_is_listed(
    words: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_TwoWords, "load", lambda _, name: name)
    found, _, rest = _TwoWords(name="memfit").resolve_command(None, words)
    assert (found, rest) == (name, words[len(name.split()) :])


def test_help_in_eighty_columns_has_full_summaries_and_upper_case_arguments(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    every = [words for words, _ in listed(Commands(name="memfit"))]
    assert len(every) > 30
    for words in every:
        ran = memfit(*words, "--help")
        usage, _, commands = ran.out.partition("--help")
        assert (ran.code, "..." in commands) == (0, False), commands
        name, _, arguments = usage.splitlines()[0].partition("memfit " + " ".join(words))
        assert name.startswith("Usage: ")
        assert arguments == arguments.upper()


def test_the_help_begins_with_what_most_people_need(memfit: Memfit) -> None:
    title, *rows = memfit("--help").out.partition("What most")[2].partition("\n\n")[0].splitlines()
    assert title == " people need:"
    assert [row.split()[0] for row in rows] == [
        *("MODEL", "fits", "server", "compare", "tune", "gate")
    ]


@pytest.mark.parametrize("group", GROUPS.values())
def test_every_command_of_a_section_exists_and_stands_in_one(group: type[LazyGroup]) -> None:
    placed = [name for names in group.sections.values() for name in names]
    assert len(placed) == len(set(placed))
    assert set(placed) <= group.summaries.keys()


def test_plans_for_tight_memory_say_for_whom_they_are(memfit: Memfit) -> None:
    rows = memfit("plan", "--help").out.partition("Tight memory:\n")[2].splitlines()
    assert [row.split()[0] for row in rows] == [
        *("experts", "offload", "wired", "growth", "static", "request")
    ]
    assert all(" For " in row for row in rows)


def test_the_server_is_also_a_command_of_its_own(memfit: Memfit) -> None:
    question = ("qwen3-4b-4bit", "--memory", "16GB", "--context", "4k", "--json")
    short, long = memfit("server", *question), memfit("plan", "server", *question)
    assert (short.code, short.out) == (long.code, long.out)
    assert "Usage: memfit server [OPTIONS]" in memfit("server", "--help").out


def test_the_help_of_gate_lists_its_subcommands(memfit: Memfit) -> None:
    ran = memfit("gate", "--help")
    assert "memfit gate [OPTIONS] COMMAND" in ran.out.splitlines()[0]
    commands = ran.out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in commands] == ["check", "init"]


@pytest.mark.parametrize("words", [["estimate"], ["plan", "wired"], ["gate", "init"], ["cache"]])
def test_help_works_at_every_level(memfit: Memfit, words: list[str]) -> None:
    ran = memfit(*words, "--help")
    assert ran.code == 0
    assert f"memfit {' '.join(words)} [OPTIONS]" in ran.out.splitlines()[0]
