"""Code that treats layer kinds differently handles every one of them, and mypy says where.

Kinds are distinguished by ``match``, which ends with `assert_never`; never by ``isinstance``.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from memfit.estimators.arch import specs

ROOT = Path(__file__).parents[2]
FOLDERS = ("api", "cli", "estimators", "probes")
KINDS = {
    kind.__name__
    for kind in (
        *get_args(specs.Mixer),
        *get_args(specs.FeedForward),
        specs.KVBuffer,
        specs.StateBuffer,
    )
}


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the modules that name a kind, parsed."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if any(kind in text for kind in KINDS):
                yield path, ast.parse(text)


def _named(node: ast.AST) -> set[str]:
    return {
        name.id if isinstance(name, ast.Name) else name.attr
        for name in ast.walk(node)
        if isinstance(name, (ast.Name, ast.Attribute))
    }


def _classes(match: ast.Match) -> set[str]:
    patterns = (node for case in match.cases for node in ast.walk(case.pattern))
    return {
        name
        for pattern in patterns
        if isinstance(pattern, ast.MatchClass)
        for name in _named(pattern.cls)
    }


def test_no_layer_kind_is_distinguished_by_isinstance() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in _sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and _named(node.args[1]) & KINDS
    ]
    assert found == []


def test_every_match_on_a_layer_kind_is_closed() -> None:
    matches = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path, tree in _sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Match) and _classes(node) & KINDS
    ]
    assert len(matches) > 5
    assert [where for where, node in matches if "assert_never" not in _named(node.cases[-1])] == []


@pytest.mark.exhaustive
def test_mypy_names_every_place_a_new_kind_must_be_handled(tmp_path: Path) -> None:
    """Each ``match`` is reported when its union gets one more class."""
    pytest.importorskip("mypy")
    tree = tmp_path / "memfit" / "estimators"
    shutil.copytree(ROOT / "estimators", tree, ignore=shutil.ignore_patterns("__pycache__"))
    _add_kinds(tree / "arch" / "specs.py")
    places = {
        f"memfit/{path.relative_to(ROOT)}"
        for path, module in _sources()
        for node in ast.walk(module)
        if isinstance(node, ast.Match) and _classes(node) & KINDS
    }
    # Without site-packages, where the environment has the tree that is not changed.
    (tmp_path / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    command = [sys.executable, "-m", "mypy", "--no-site-packages", "--config-file"]
    done = subprocess.run(
        [*command, str(ROOT / "pyproject.toml"), *sorted(places)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if 'to "assert_never"' in line]
    assert {line.partition(":")[0] for line in errors} == places
    assert any('"NewMixer"' in line for line in errors)
    assert any('"NewBlock"' in line for line in errors)


def _add_kinds(path: Path) -> None:
    """Add a copy of one class to each union."""
    source = path.read_text(encoding="utf-8")
    for union, like, new in (
        ("Mixer", "GatedDelta", "NewMixer"),
        ("FeedForward", "DenseMLP", "NewBlock"),
    ):
        found = re.search(rf"class {like}\(Struct.*?(?=\n\n\n)", source, re.DOTALL)
        assert found is not None
        copy = found[0].replace(f"class {like}(", f"class {new}(")
        source = source.replace(f"\n{union} = ", f"\n{copy}\n\n\n{union} = {new} | ", 1)
    path.write_text(source, encoding="utf-8")
