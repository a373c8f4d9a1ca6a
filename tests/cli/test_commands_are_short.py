"""A command function reads its options from groups, and leaves work to the library."""

import ast
from pathlib import Path

COMMANDS = Path(__file__).parents[2] / "cli" / "commands"
MAX_LINES = 40
MAX_PARAMETERS = 6


def test_a_function_of_a_command_is_short_and_takes_few_parameters() -> None:
    functions = {
        f"{path.relative_to(COMMANDS)}:{node.name}": node
        for path in sorted(COMMANDS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert {"estimate.py:estimate", "gate.py:check", "plan/static.py:static"} <= functions.keys()
    assert [name for name, each in functions.items() if lines(each) > MAX_LINES] == []
    assert [name for name, each in functions.items() if parameters(each) > MAX_PARAMETERS] == []


def lines(function: ast.FunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
