"""There are no import cycles, not even for types or inside a function."""

import ast
from collections.abc import Set as AbstractSet
from graphlib import TopologicalSorter
from pathlib import Path

from tests.test_packaging import dotted

ROOT = Path(__file__).parent.parent


def module_graph() -> dict[str, set[str]]:
    """Return every module of the package with all modules it imports, anywhere in the file."""
    files = {
        dotted(path): path
        for top in ("api", "cli", "estimators", "probes")
        for path in (ROOT / top).rglob("*.py")
    }
    named = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return {name: imported(path, named.keys()) - {name} for name, path in named.items()}


def imported(path: Path, names: AbstractSet[str]) -> set[str]:
    """Return the modules a file imports; of ``from package import module`` the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & names
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & names) or ({node.module} & names)
    return found


def test_there_are_no_import_cycles() -> None:
    order = list(TopologicalSorter(module_graph()).static_order())
    assert len(order) > 300
