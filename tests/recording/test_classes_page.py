"""docs/programs.md says of every class of mlx-lm that no formula describes how it is answered.

``python -m tests.recording.test_classes_page`` rewrites the table.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from memfit.estimators.arch.registry import FAMILIES
from memfit.estimators.programs.graph import decoded

pytest.importorskip("mlx_lm")

from memfit.estimators.recording.make import DATA, RECORDED
from memfit.estimators.recording.plans import UNRECORDED

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
_TABLE = re.compile(r"(?<=<!-- generated -->\n\n)(?:\|.*\n?)+")


def table() -> str:
    """Return the table of undescribed classes."""
    rows = ["| Class | Without MLX | Error against the trace, or why not |", "|---|---|---|"]
    for name in sorted((*RECORDED, *UNRECORDED), key=str.lower):
        if why := UNRECORDED.get(name):
            rows.append(f"| `{name}` | no | {why} |")
            continue
        variants = decoded((DATA / f"{name}.json").read_bytes()).variants
        backends = dict.fromkeys(each for one in variants for each in one.facts["backend"])
        rows.append(f"| `{name}` | on {', '.join(map(str, backends))} | 0 |")
    return "\n".join(rows) + "\n"


def test_the_page_says_how_each_undescribed_class_is_answered() -> None:
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table()


def test_every_class_that_no_formula_describes_is_recorded_or_has_a_reason() -> None:
    spec = find_spec("mlx_lm")
    assert spec
    assert spec.origin
    files = (Path(spec.origin).parent / "models").glob("*.py")
    classes = {each.stem for each in files if "class ModelArgs" in each.read_text()}
    assert classes - FAMILIES.keys() == RECORDED.keys() | UNRECORDED.keys()
    assert not RECORDED.keys() & UNRECORDED.keys()


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")))
