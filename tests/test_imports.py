"""The command line starts light: what it loads, and what the library never does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"httpx2", "huggingface_hub", "mlx", "mlx_lm", "numpy", "rich", "transformers", "yaml"}
LIBRARY = sorted(path for top in ("estimators", "probes") for path in (ROOT / top).rglob("*.py"))


def loaded_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after ``statement``."""
    code = f"import sys; {statement}; print(*sys.modules, sep='\\n')"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return {name.split(".")[0] for name in ran.stdout.split()}


def test_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_after("import memfit.cli.app") & HEAVY == set()


def test_the_library_loads_neither_typer_nor_rich() -> None:
    loaded = loaded_after("import memfit.estimators.estimate, memfit.probes")
    assert loaded & (HEAVY | {"typer"}) - {"yaml"} == set()


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_neither_prints_nor_exits(path: Path) -> None:
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert {"print", "exit", "quit", "sys.exit", "os._exit"}.isdisjoint(calls)
