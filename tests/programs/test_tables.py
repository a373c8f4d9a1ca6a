"""The tables of other programs' flags are what their own parsers have."""

from pathlib import Path

import pytest

from memfit.estimators.questions import programs as package
from memfit.estimators.questions.programs.program import Program
from memfit.estimators.questions.programs.reading import programs
from tests.printed import parser_of
from tests.programs import llama_help

FOLDER = Path(package.__file__).parent
PROGRAMS = tuple({each.name: each for each in programs().values()}.values())
OF_MLX = tuple(each.name for each in PROGRAMS if each.name.startswith("mlx_"))


def table(name: str) -> list[str]:
    return (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", OF_MLX)
def test_the_flags_of_a_program_of_mlx_are_those_of_its_parser(name: str) -> None:
    arity: dict[object, object] = {None: "=", 0: ""}
    rows = [
        " ".join(
            [
                *sorted(action.option_strings, key=lambda name: name.startswith("--")),
                str(arity.get(action.nargs, action.nargs)),
            ]
        ).strip()
        for action in parser_of(name)._actions
    ]
    assert table(name) == rows


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", llama_help.EXAMPLES)
def test_the_flags_of_a_program_of_llama_cpp_are_those_of_its_help(name: str) -> None:
    pytest.importorskip(
        "xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp==2026.10.11549"
    )
    assert table(name) == llama_help.rows(name)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_flag_that_is_said_something_of_is_one_of_the_program(program: Program) -> None:
    named = {**program.taken, **program.undescribed, **program.noted, **program.bare}
    assert [flag for flag in named if flag not in program.flags] == []
    # One thing is said of each flag.
    said = [program.taken.keys(), program.undescribed.keys(), program.noted.keys()]
    assert sum(map(len, said)) == len(set().union(*said))
