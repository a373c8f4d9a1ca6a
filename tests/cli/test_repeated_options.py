"""An option that is given more than once is a list or an error, in every command."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from memfit.cli.app import app
from memfit.cli.command_groups import GroupedCommand
from tests.cli.running import Memfit


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], GroupedCommand]]:
    """Yield every command with the words that name it."""
    for name in group.commands:
        found = group.load(name) if hasattr(group, "load") else group.commands[name]
        words = (*path, *name.split())
        if hasattr(found, "commands"):
            yield from commands(found, *words)
        else:
            yield words, found


def repeated(option: Any) -> list[str]:
    """The arguments that give an option twice, under its first and its last name."""
    names = (option.opts[0], (option.secondary_opts or option.opts)[-1])
    values = () if option.is_flag else ("1",) * option.nargs
    return [word for name in names for word in (name, *values)]


@pytest.mark.exhaustive(daily=True)
def test_no_command_drops_an_option_that_is_given_twice(memfit: Memfit) -> None:
    dropped, looked_at = [], 0
    for words, command in commands(get_command(app)):
        if not isinstance(command, GroupedCommand):
            assert {each.param_type_name for each in command.params} <= {"argument"}, words
            continue
        for option in command.params:
            is_switch = getattr(option, "is_flag", False) and not option.secondary_opts
            if option.param_type_name != "option" or option.multiple or is_switch:
                continue
            looked_at += 1
            is_list = option.opts[0] in ("--device", "--memory") and any(
                "--ranks" in each.opts for each in command.params
            )
            run = memfit(*words, *repeated(option))
            if not is_list and (run.code, "times: give it once" in run.err) != (2, True):
                dropped.append((words, option.opts[0], run.err))
    assert not dropped
    assert looked_at > 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "2", "-np", "3"), "--batch is given 2 times: give it once (-np,"),
        (("--flash-attn", "--no-flash-attn"), "--flash-attn is given 2 times"),
        (("--device=m4-max-64", "--memory", "32", "--device", "m1-16"), "give only one"),
    ],
)
def test_the_message_names_the_option(
    memfit: Memfit, arguments: tuple[str, ...], message: str
) -> None:
    run = memfit("estimate", "qwen3-4b-4bit", *arguments)
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    assert message in run.err


def test_a_switch_may_be_repeated(memfit: Memfit) -> None:
    assert memfit("estimate", "qwen3-4b-4bit", "--json", "--json").code == 0
