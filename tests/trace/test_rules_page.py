"""docs/trace-rules.md: the rules of the trace, and what classes make MLX compute.

``python -m tests.trace.test_rules_page`` rewrites it.
"""

import ast
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.data.changes import CHANGES
from memfit.estimators.mlx.data.scheduling import SCHEDULING
from memfit.estimators.mlx.versions import MLX_VERSION, format_version
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.trace import compiled_functions, memory, operation, schedule
from memfit.estimators.trace.libraries import changed
from tests.machine.test_runtime import mlx_lm_source
from tests.mlx_memory import settled_bytes
from tests.trace.test_rules import CLEARED_EVERY

pytest.importorskip("mlx_lm")

import mlx.core as mx

from memfit.estimators.trace.isolation import ANSWERS
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for
from memfit.estimators.trace.traced_model import TracedModel

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "trace-rules.md"
CONFIGS: list[dict[str, Any]] = [
    *(json.loads(p.read_text()) for p in sorted((HERE.parent / "arch/cases").glob("*.json"))),
    *json.loads((HERE / "cases.json").read_text()),
]
NOT_HERE = "olmo"  # needs another package
SMALL_BYTES = 100_000
# Where the sources are that MLX does not ship.
READ = "mlx 0.31.0, 0.32.1"
OLDER = "mlx 0.29.2, 0.31.0, 0.32.1"
Row = tuple[str, object, str, str]
INTRODUCTION = """\
Facts about mlx-lm and MLX that figures depend on. *Tested* rows are compared with the source in the
installed package; the others were read in these versions and in commit 846d176 of MLX. The fused
kernels of each version are in `estimators/mlx/data/kernels.py`, with their sources."""
ON_CHANGES = """\
`--mlx-version`, `--mlx-lm-version` and `--mlx-vlm-version` choose the rules. A row holds from
*since* on, and ends before *until*."""


def page() -> str:
    return "\n".join(["# Rules of the trace", "", *_rules(), "", *_changes(), *_classes(), ""])


def _rules() -> Iterator[str]:
    yield INTRODUCTION
    yield ""
    yield "| rule | value | source | read at |"
    yield "|---|---|---|---|"
    for name, value, source, read_at in (*_of_the_loop(), *_shipped(), *_unshipped()):
        yield f"| {name} | {value} | {source} | {read_at} |"


def _of_the_loop() -> Iterator[Row]:
    runtime = get_runtime("mlx-lm")
    read_at = f"mlx-lm {runtime.version}, tested"
    step, cache = "mlx_lm/generate.py, generate_step", "mlx_lm/models/cache.py"
    yield "tokens of a chunk of the prompt", runtime.prefill_step, step, read_at
    yield "tokens by which caches grow", runtime.kv_step, f"{cache}, `step`", read_at
    start = "tokens from which caches are quantised"
    yield start, runtime.quantized_kv_start, "mlx_lm/generate.py", read_at
    yield "group of a quantised cache", runtime.kv_group_size, step, read_at
    cleared = "freed buffers are cleared after each chunk, and after this many tokens"
    yield cleared, CLEARED_EVERY, step, read_at


def _shipped() -> Iterator[Row]:
    read_at = f"mlx {format_version(MLX_VERSION)}, tested"
    yield "width of the evaluation tape", schedule.WIDTH, "mlx/utils.h, bfs_max_width", read_at
    dispatches = SCHEDULING["cpu_dispatches_per_task"]
    yield "dispatches of a CPU task", dispatches, "backend/cpu/encoder.h", read_at
    slack = "bytes by which a donated buffer may be too large"
    yield slack, operation.DONATION_SLACK, "backend/common/utils.h, is_donatable", read_at
    reuse = "a freed buffer is reused below"
    yield reuse, "min(2 size, size + 2 pages)", "backend/common/buffer_cache.h", read_at


def _unshipped() -> Iterator[Row]:
    yield "tasks or batches in flight", SCHEDULING["max_active_tasks"], "transforms.cpp", OLDER
    pages = "page of the buffer cache, bytes"
    yield pages, _listed(memory.PAGE), "backend/*/allocator.cpp", "mlx 0.32.1"
    metal = "Metal closes a command buffer above these kernels / Mi elements, by GPU class"
    yield metal, _limits("command_buffers"), "backend/metal/device.cpp", OLDER
    cuda = "CUDA launches a graph above these kernels / Mi elements, by compute capability"
    yield cuda, _limits("cuda_graphs"), "backend/cuda/device.cpp", READ
    most = f"{compiled_functions.MAX_DEPTH}, {compiled_functions.MAX_ARRAYS}"
    yield "depth and arrays of a compiled function's kernel", most, "compile.cpp", OLDER


def _limits(table: str) -> str:
    return ", ".join(
        f"{name}: {limits['max_ops']} / {limits['max_mebi_elements']}"
        for name, limits in SCHEDULING[table].items()
    )


def _listed(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _changes() -> Iterator[str]:
    yield "## What changed between versions"
    yield ""
    yield ON_CHANGES
    yield ""
    yield "| rule | of | since | until | source |"
    yield "|---|---|---|---|---|"
    for name, row in CHANGES.items():
        span = " | ".join(format_version(row.get(key, ())) for key in ("since", "until"))
        yield f"| {name.replace('_', ' ')} | {row['package']} | {span} | {row['source']} |"
    yield ""


def _classes() -> Iterator[str]:
    asked, _ = _costs()
    yield "## Classes that make MLX compute"
    yield ""
    yield f"Of {len(CONFIGS) - 1} configurations, for every class of mlx-lm, none makes MLX hold"
    yield f"{SMALL_BYTES:,} bytes while it is recorded. Classes that ask for values get zeros:"
    yield "; ".join(f"`{name}` ({', '.join(sorted(asks))})" for name, asks in sorted(asked.items()))


@cache
def _costs() -> tuple[dict[str, set[str]], dict[str, int]]:
    """Return the values each model type read, and the most bytes MLX allocated."""
    asked: dict[str, set[str]] = {}
    largest: dict[str, int] = {}
    for config in CONFIGS:
        name = config["model_type"]
        if name == NOT_HERE:
            continue
        questions: set[str] = set()
        before = settled_bytes()
        with _noting(questions):
            built = TracedModel(config, "metal")
            built.record(Workload(prompt_tokens=40, max_tokens=2), TraceTarget(backend="metal"))
        largest[name] = max(largest.get(name, 0), mx.get_peak_memory() - before)
        if questions:
            asked.setdefault(name, set()).update(questions)
    return asked, largest


@contextmanager
def _noting(questions: set[str]) -> Iterator[None]:
    def noted(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*given: Any) -> Any:
            questions.add(name)
            return answer(*given)

        return ask

    core = library_for("metal").core
    methods = {name: noted(f"array.{name}", answer) for name, answer in ANSWERS.items()}
    functions = {name: noted(name, getattr(core, name)) for name in ("eval", "async_eval")}
    with mock.patch.dict(ANSWERS, methods), changed(core, functions):
        yield


@pytest.mark.exhaustive
def test_the_page_matches_the_tables_and_the_classes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_class_of_mlx_lm_is_covered() -> None:
    utils = mlx_lm_source("utils.py")
    renamed = next(
        ast.literal_eval(node.value)
        for node in utils.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING"
    )
    traced = {config["model_type"] for config in CONFIGS}
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    classes = {
        path.stem
        for path in (Path(spec.origin).parent / "models").glob("*.py")
        if re.search(r"^class Model\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert classes - {renamed.get(name, name) for name in traced} == set()


@pytest.mark.exhaustive
def test_no_class_makes_mlx_allocate_the_model() -> None:
    assert max(_costs()[1].values()) < SMALL_BYTES


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
