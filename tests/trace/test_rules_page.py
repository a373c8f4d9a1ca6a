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
from memfit.estimators.mlx.data.kernels import KERNELS
from memfit.estimators.mlx.data.scheduling import SCHEDULING
from memfit.estimators.mlx.versions import MLX_VERSION, format_version
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.trace import fusion, memory, operation, schedule
from memfit.estimators.trace.libraries import changed
from tests.machine.test_runtime import mlx_lm_source
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
READ = "mlx 0.31.0, 0.32.1, 846d176"
OLDER = "mlx 0.29.2 (85a8824), 0.31.0, 0.32.1, 846d176"
Row = tuple[str, object, str, str]
INTRODUCTION = """\
Facts about mlx-lm's loop and MLX's evaluation that figures depend on, from the tables that the code
reads. Where the installed packages ship the source, `tests/trace/test_rules.py` and
`tests/machine/test_runtime.py` compare it and fail when it differs."""
ON_CHANGES = """\
`--mlx-version` and `--mlx-lm-version` choose the rules. A row holds from the first version on, and
ends before the second."""
ON_ATTENTION = """\
The first row that is not newer than the MLX version holds; widths are of keys and values. The CPU
has no fused kernel. Metal's file is mlx/backend/metal/scaled_dot_product_attention.cpp; releases
without a public tag were read in the library of their package."""


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        ["# Rules of the trace", "", *_rules(), "", *_changes(), *_kernels(), *_classes(), ""]
    )


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
    kept = "first tokens a rotating cache keeps"
    yield kept, runtime.rotating_keep, f"{cache}, make_prompt_cache", read_at
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
    yield pages, _listed(memory.PAGE), "backend/*/allocator.cpp", "mlx 0.32.1, 846d176"
    for gpu, limits in SCHEDULING["command_buffers"].items():
        name = f"Metal, class {gpu}: a command buffer closes above"
        yield name, _limits(limits), "backend/metal/device.cpp", OLDER
    for capability, limits in SCHEDULING["cuda_graphs"].items():
        name = f"CUDA, capability {capability}: a graph is launched above"
        yield name, _limits(limits), "backend/cuda/device.cpp", READ
    most = f"{fusion.MAX_DEPTH}, {fusion.MAX_ARRAYS}"
    yield "depth and arrays of a compiled function's kernel", most, "compile.cpp", OLDER


def _limits(limits: Mapping[str, int]) -> str:
    return f"{limits['max_ops']} kernels or {limits['max_mebi_elements']} Mi elements"


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


def _kernels() -> Iterator[str]:
    yield "## Fused attention"
    yield ""
    yield ON_ATTENTION
    yield ""
    yield "| backend | since mlx | kernels | source |"
    yield "|---|---|---|---|"
    for backend, rows in KERNELS.items():
        for row in rows:
            kernels = "; ".join(map(_kernel, row["rules"]))
            yield f"| {backend} | {format_version(row['since'])} | {kernels} | {row['source']} |"
    yield ""


def _kernel(rule: Mapping[str, Any]) -> str:
    least, most = rule["queries"]
    queries = f"{least} queries or more" if most is None else f"{least} to {most} queries"
    widths = ", ".join(f"{a}/{b}" if a != b else str(a) for a, b in rule.get("widths", ()))
    others = (
        f"{name.replace('_', ' ')} {', '.join(value) if isinstance(value, tuple) else value}"
        for name, value in rule.items()
        if name not in ("queries", "widths") and value is not None
    )
    return ", ".join(filter(None, (queries, widths and f"widths {widths}", *others)))


def _classes() -> Iterator[str]:
    asked, _ = _costs()
    version = get_runtime("mlx-lm").version
    yield "## Classes that make MLX compute"
    yield ""
    yield f"Every class of mlx-lm {version} is built and recorded in a small shape"
    yield f"({len(CONFIGS) - 1} configurations). None makes MLX hold {SMALL_BYTES:,} bytes: there"
    yield "are the constants that classes make of Python's numbers. Those that ask for values get"
    yield "zeros:"
    yield ""
    yield "| model type | asks for | costs |"
    yield "|---|---|---|"
    for name, questions in sorted(asked.items()):
        yield f"| `{name}` | {', '.join(sorted(questions))} | nothing: it is not computed |"


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
        before = mx.get_active_memory()
        mx.reset_peak_memory()
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


def test_no_class_makes_mlx_allocate_the_model() -> None:
    assert max(_costs()[1].values()) < SMALL_BYTES


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
