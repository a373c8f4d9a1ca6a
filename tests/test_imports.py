"""The command line starts fast: its imports, and what the library never does."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import QWEN3_4B, plain_tensors, write_checkpoint

ROOT = Path(__file__).parent.parent
HEAVY = {"httpx2", "huggingface_hub", "mlx", "mlx_lm", "numpy", "rich", "transformers", "yaml"}
# Modules that an answer about a directory of safetensors does not need, by measurement.
UNNEEDED_STANDARD = {"asyncio", "concurrent", "importlib.resources", "ssl", "tempfile"}
UNNEEDED = {
    *(
        f"memfit.estimators.{name}"
        for name in (
            *("compare", "gate", "plans", "trace", "arch.gguf", "checkpoint.adapters"),
            *("checkpoint.gguf", "checkpoint.hub", "checkpoint.local.samples"),
            *("checkpoint.local.stores", "machine.host", "sizing.explain"),
            *("sizing.explore", "sizing.measurement_lookup"),
            *("runtimes.agent_memory", "runtimes.auto_context", "runtimes.cache_lines"),
            *("runtimes.foundry", "runtimes.growth", "runtimes.llama_cpp", "runtimes.measured"),
            *("runtimes.mlx_lm_trace", "runtimes.mlx_moe", "runtimes.mlx_swift_lm"),
            *("runtimes.token_cache", "runtimes.token_cost", "runtimes.vllm", "runtimes.zinc"),
        )
    ),
    *(f"memfit.cli.render.{name}" for name in ("chart", "plot", "svg", "writers.html")),
    *(f"memfit.cli.commands.{name}" for name in ("compare", "devices", "gate", "plan", "runtimes")),
}
LIBRARY = sorted(
    path for top in ("api", "estimators", "probes") for path in (ROOT / top).rglob("*.py")
)


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules, sep='\\n', file=sys.stderr)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(ran.stderr.split())


def loaded_after(statement: str) -> set[str]:
    """Return the packages among them."""
    return {name.split(".")[0] for name in modules_after(statement)}


def test_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_after("import memfit.cli.app") & HEAVY == set()


def test_importing_the_command_line_keeps_garbage_collection_unchanged() -> None:
    code = "import gc; was = gc.get_threshold()\nimport memfit.cli.app, memfit.cli.__main__\n"
    subprocess.run(
        [sys.executable, "-c", f"{code}assert gc.get_threshold() == was"], check=True, timeout=60
    )


def test_what_sizes_a_model_is_imported_while_the_hub_answers() -> None:
    modules = modules_after("import memfit.cli.commands.estimate")
    later = ("memfit.estimators.weights", "memfit.estimators.workspace")
    assert not [name for name in modules if name.startswith(later)]


def test_the_library_loads_neither_typer_nor_rich() -> None:
    loaded = loaded_after("import memfit.estimators.sizing.estimate, memfit.probes")
    assert loaded & (HEAVY | {"typer"}) - {"yaml"} == set()


def test_a_question_to_the_library_loads_neither_typer_nor_a_command() -> None:
    modules = modules_after("import memfit; memfit.estimate('qwen3-4b-4bit', memory='8GB')")
    assert {name for name in modules if name.split(".")[0] in {"typer", "rich"}} == set()
    assert not {name for name in modules if name.startswith("memfit.cli")}


@pytest.fixture(scope="module")
def after_an_estimate(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The modules loaded at the end of an estimate of a directory."""
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(directory, QWEN3_4B, plain_tensors(QWEN3_4B))
    arguments = ["memfit", "estimate", str(directory), "--device", "m4-max-64"]
    code = f"""
from memfit.cli.app import main
sys.argv = {[*arguments, "--method", "formula"]!r}
try:
    main()
except SystemExit as exit_:
    assert exit_.code == 0, exit_.code"""
    return modules_after(code)


def test_an_estimate_loads_only_modules_it_needs(after_an_estimate: set[str]) -> None:
    unneeded = UNNEEDED | UNNEEDED_STANDARD | HEAVY - {"rich"}
    assert after_an_estimate & unneeded == set()


def test_every_module_in_the_banned_list_exists() -> None:
    assert [name for name in sorted(UNNEEDED) if not importlib.util.find_spec(name)] == []


def test_classes_are_structs_which_take_a_tenth_of_the_time_to_define() -> None:
    assert len(LIBRARY) > 250
    assert not [path for path in LIBRARY if "dataclass(" in path.read_text()]


def test_nothing_below_the_command_line_names_it() -> None:
    """Import contracts do not see a module that is imported by its name."""
    named = re.compile(r"\bmemfit\.cli\b|^cli\.")
    entry = ROOT / "api" / "__main__.py"  # python -m memfit
    assert not [
        f"{path.relative_to(ROOT)}: {node.value[:60]}"
        for path in LIBRARY
        if path != entry
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and named.search(node.value)
    ]


def test_the_library_neither_prints_nor_exits() -> None:
    banned = {"print", "exit", "quit", "sys.exit", "os._exit"}
    # The evaluators of a memory card are programs of their own, which users copy.
    texts = {path: path.read_text() for path in LIBRARY if path.parent.name != "evaluators"}
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}"
        for path, text in texts.items()
        if re.search(r"\b(?:print|_?exit|quit)\b", text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in banned
    ]
    assert calls == []
