"""A regular class is added as CONTRIBUTING says, in a copy of the product that runs by itself."""

import json
from pathlib import Path

from tests.tree_copy import TreeCopy

ROWS, REGISTRY = "estimators/arch/families/moe_models.py", "estimators/arch/registry.py"
CASE = Path(__file__).parent / "cases" / "dots1.json"


def test_a_row_and_its_type_in_the_registry_add_a_regular_class(tmp_path: Path) -> None:
    tree = TreeCopy(tmp_path / "tree")
    before, begin, rest = (tree.folder / ROWS).read_text(encoding="utf-8").partition('    "dots1"')
    row, end, after = rest.partition("\n    ),\n")
    types = (tree.folder / REGISTRY).read_text(encoding="utf-8")
    tree.write(ROWS, before + after)
    tree.write(REGISTRY, types.replace("dots1 ", ""))
    question = ("estimate", CASE, "--method", "formula", "--json")
    unknown = tree.run(*question)
    assert (unknown.returncode, "'dots1' is not described" in unknown.stderr) == (3, True)

    tree.insert(ROWS, after[:40], begin + row + end)
    tree.insert(REGISTRY, "ernie4_5_moe", "dots1 ")
    known = tree.run(*question)
    assert known.returncode == 0, known.stderr
    assert json.loads(known.stdout)["model"]["model_type"] == "dots1"
