"""Commands are imported when they are called; listings show each command's own summary."""

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


def test_a_command_has_the_same_summary_in_the_list_and_in_its_help() -> None:
    for group in GROUPS.values():
        loaded = {name: group(name="memfit").load(name) for name in group.summaries}
        assert {
            name: own.get_short_help_str(limit=200).rstrip(".") for name, own in loaded.items()
        } == {name: summary.rstrip(".") for name, summary in group.summaries.items()}


@pytest.mark.parametrize("folder", GROUPS)
def test_every_module_of_a_command_is_listed(folder: str) -> None:
    found = {path.stem for path in (ROOT / "cli" / folder).iterdir()}
    listed = {name.replace(" ", "_") for name in GROUPS[folder].summaries}
    assert listed == found - {"__init__", "__pycache__", "subject"}


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


def _listed(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Every group and command, by its words."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        loaded = group.load(name) if isinstance(group, LazyGroup) else command
        yield from _listed(loaded, *path, name)


def test_help_in_eighty_columns_has_full_summaries_and_upper_case_arguments(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = list(_listed(Commands(name="memfit")))
    assert len(listed) > 30
    for words in listed:
        ran = memfit(*words, "--help")
        usage, _, commands = ran.out.partition("Commands:")
        assert (ran.code, "..." in commands) == (0, False), commands
        name, _, arguments = usage.splitlines()[0].partition("memfit " + " ".join(words))
        assert name.startswith("Usage: ")
        assert arguments == arguments.upper()


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
