"""docs/architectures.md names exactly the described model types.

``python -m tests.arch.test_architectures_page`` rewrites the table.
"""

import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path

from memfit.estimators.arch.registry import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
_TABLE = re.compile(r"(?<=\n\n)\| Model types .*?(?=\n\n|\Z)", re.DOTALL)


def table() -> str:
    """Return the table of families: the first line of each module, and its model types."""
    types = defaultdict(list)
    for model_type, module in sorted(FAMILIES.items()):
        types[module].append(f"`{model_type}`")
    rows = ["| Model types | Described in | What they are |", "|---|---|---|"]
    for module, names in sorted(types.items()):
        doc = import_module(f"memfit.estimators.arch.families.{module}").__doc__ or ""
        first = " ".join(doc.strip().split("\n\n")[0].split())
        rows.append(f"| {', '.join(names)} | `families/{module}.py` | {first} |")
    return "\n".join(rows)


def test_the_page_names_every_described_model_type() -> None:
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0].strip() == table()


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")))
