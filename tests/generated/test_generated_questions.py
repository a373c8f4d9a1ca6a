"""What is printed is true of what it is printed for, in questions of every kind.

Every printed command, given back to memfit as its program reads it, has the verdict it was printed
under, and no two outputs of one question contradict. `python -m benchmarks.generated_questions`
checks 2,000 questions.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.generated.contradictions import contradictions
from tests.generated.questions import Models, drawn

PARTS = 4  # tests run beside each other


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("generated"))


@pytest.mark.parametrize("part", range(PARTS))
def test_no_answer_contradicts_itself(models: Models, tmp_path: Path, part: int) -> None:
    programs, found = checked(models, tmp_path, 300, part, is_quick=True)
    assert found == []
    assert programs["mlx_lm.server"] > 20, programs
    often = ("mlx_lm.generate", "mlx_lm.convert", "llama-server", "mlx_vlm.generate")
    assert min(programs[name] for name in often) > 2, programs


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_no_answer_about_any_sample_contradicts_itself(
    models: Models, tmp_path: Path, part: int
) -> None:
    programs, found = checked(models, tmp_path, 600, part)
    assert found == []
    assert programs["mlx_lm.server"] > 10, programs


def checked(
    models: Models, folder: Path, count: int, part: int, *, is_quick: bool = False
) -> tuple[Counter[str], list[str]]:
    """Ask a part of the questions; return the printed programs and what contradicts."""
    programs: Counter[str] = Counter()
    found = []
    for number, question in enumerate(drawn(count, is_quick=is_quick)):
        if number * PARTS // count == part:
            for program, contradiction in contradictions(models, question, folder, number):
                programs[program] += 1
                found += [f"{number} {question}: {contradiction}"] if contradiction else []
    return programs, found
