"""A command function reads its options from groups, and leaves work to the library."""

import ast
from pathlib import Path

import pytest

COMMANDS = Path(__file__).parents[2] / "cli" / "commands"
MAX_LINES = 40
MAX_PARAMETERS = 6
FUNCTIONS = [
    pytest.param(node, id=f"{path.relative_to(COMMANDS)}:{node.name}")
    for path in sorted(COMMANDS.rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef)
]


def test_the_commands_are_found() -> None:
    names = {str(each.id) for each in FUNCTIONS}
    assert {"estimate.py:estimate", "gate.py:check", "plan/static.py:static"} <= names


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_a_command_is_short(function: ast.FunctionDef) -> None:
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno < MAX_LINES


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_a_command_takes_few_parameters(function: ast.FunctionDef) -> None:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    assert len(named) <= MAX_PARAMETERS
