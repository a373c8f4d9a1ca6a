"""No code outside of `runtimes` depends on the name or the class of a runtime."""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from memfit.estimators.runtimes import registry
from memfit.estimators.runtimes.registry import runtime_names
from tests.selection import quick
from tests.test_imports import modules_after

ROOT = Path(__file__).parents[2]
FOLDERS = ("api", "benchmarks", "cli", "estimators", "probes")
RUNTIMES = ROOT / "estimators" / "runtimes"
OUTSIDE = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if RUNTIMES not in path.parents
)


@lru_cache(maxsize=1)
def names_in_runtimes() -> frozenset[str]:
    """Return the names of all runtimes' facts and classes."""
    found, bases_of = set(), {}
    for path in RUNTIMES.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if ast.unparse(node.value.func).endswith("Runtime"):
                    found.add(ast.unparse(node.targets[0]))
            elif isinstance(node, ast.ClassDef):
                bases_of[node.name] = {ast.unparse(base) for base in node.bases}
    classes = {"Runtime", "RuntimeModel"}
    while more := {name for name, bases in bases_of.items() if bases & classes} - classes:
        classes |= more
    return frozenset({*found, *classes} - {"Runtime"})


def comparisons_with_a_runtime(tree: ast.AST, names: frozenset[str]) -> Iterator[str]:
    """Yield comparisons with a runtime's name, and tests of its class."""
    runtimes = runtime_names()
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            operands = node.args[1:] if node.func.id in ("isinstance", "issubclass") else []
        elif isinstance(node, ast.Dict):
            operands = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.MatchClass):
            operands = [node.cls]
        for operand in operands:
            for part in ast.walk(operand):
                name = getattr(part, "id", None) or getattr(part, "attr", None)
                if name in names or (isinstance(part, ast.Constant) and part.value in runtimes):
                    yield f"{node.lineno if hasattr(node, 'lineno') else 0}: {ast.unparse(node)}"


def test_nothing_outside_depends_on_a_runtimes_name_or_class() -> None:
    allowed = {
        ROOT / "estimators/trace/libraries.py",  # the version of the package mlx-lm
        ROOT / "estimators/checkpoint/local/stores.py",  # Ollama's store
    }
    names = names_in_runtimes()
    offenders = [
        f"{path.relative_to(ROOT)}:{comparison}"
        for path in OUTSIDE
        if path not in allowed
        if any(word in (text := path.read_text()) for word in {*names, *runtime_names()})
        for comparison in comparisons_with_a_runtime(ast.parse(text), names)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    "code",
    [
        "sized.runtime == 'vllm'",
        "runtime.name in ('zinc', 'foundry')",
        "isinstance(model, MlxLmTrace)",
        "isinstance(model, Zinc | vllm.Vllm)",
        "{'mlx-lm': 1}[name]",
        "match name:\n    case 'zinc': pass",
        "match model:\n    case MeasuredModel(): pass",
        "model.runtime is FOUNDRY",
    ],
)
def test_every_kind_of_comparison_is_found(code: str) -> None:
    assert list(comparisons_with_a_runtime(ast.parse(code), names_in_runtimes()))


@pytest.mark.parametrize("name", quick(runtime_names(), ("vllm", "ollama")))
def test_a_runtime_can_be_imported_alone(name: str) -> None:
    code = f"from memfit.estimators.runtimes.registry import get_runtime\nget_runtime({name!r})"
    loaded = modules_after(code)
    modules = {f"memfit.estimators.runtimes.{module}" for module, _ in registry._CLASSES.values()}
    own = f"memfit.estimators.runtimes.{registry._CLASSES[name][0]}"
    # mlx-swift-lm and mlx-moe run mlx-lm's classes, LM Studio mlx-vlm's, Ollama llama-server.
    others = {"ollama": ["llama_cpp.runtime"], "lm-studio": ["mlx_lm", "mlx_vlm"]}
    started = {f"memfit.estimators.runtimes.{each}" for each in others.get(name, ["mlx_lm"])}
    assert loaded & modules <= {own, *started}
