"""The trace's constants of mlx-lm's loop and of MLX, compared with the installed versions."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from memfit.estimators.arch.specs import STEP
from memfit.estimators.mlx.scheduler import CPU_DISPATCHES_PER_TASK
from memfit.estimators.mlx.versions import MLX_VERSION
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.trace import operation, schedule
from tests.machine.test_runtime import mlx_lm_source, named

# mlx-lm clears the cache of buffers after each chunk, and after this many tokens.
CLEARED_EVERY = 256


def header(name: str) -> str:
    """Return a header of the installed MLX; it ships few of its sources."""
    spec = importlib.util.find_spec("mlx")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "include" / "mlx" / name
        if path.exists():
            return path.read_text(encoding="utf-8")
    pytest.skip("MLX is not installed with its headers")


def loop() -> str:
    """Return generate_step as Python writes it."""
    return ast.unparse(named(mlx_lm_source("generate.py"), "generate_step"))


def test_a_chunk_ends_by_evaluating_caches_and_clearing_buffers() -> None:
    chunks = loop().partition("while total_prompt_tokens")[2].partition("while True")[0]
    assert chunks.index("mx.eval([c.state for c in prompt_cache])") < chunks.index("clear_cache()")
    assert "min(prefill_step_size, remaining)" in chunks
    assert "remaining = total_prompt_tokens - prompt_processed_tokens - 1" in chunks


def test_buffers_are_cleared_as_often_as_in_mlx_lm() -> None:
    assert re.findall(r"if n % (\d+) == 0:\s+mx.clear_cache\(\)", loop()) == [str(CLEARED_EVERY)]


def test_the_kv_step_of_mlx_lm_is_the_growth_step() -> None:
    assert get_runtime("mlx-lm").kv_step == STEP


def test_a_cpu_task_has_as_many_dispatches_as_in_the_installed_mlx() -> None:
    found = re.search(r"DISPATCHES_PER_TASK = (\d+);", header("backend/cpu/encoder.h"))
    assert found is not None
    assert int(found[1]) == CPU_DISPATCHES_PER_TASK


def test_the_evaluation_width_equals_the_installed_mlx() -> None:
    found = re.search(r'get_var\("MLX_BFS_MAX_WIDTH", (\d+)\)', header("utils.h"))
    assert found is not None
    assert int(found[1]) == schedule.WIDTH


def test_the_size_limit_for_donation_equals_the_installed_mlx() -> None:
    found = re.search(r"donation_extra = (\d+);", header("backend/common/utils.h"))
    assert found is not None
    assert int(found[1]) == operation.DONATION_SLACK


def test_a_freed_buffer_is_reused_by_the_rule_of_the_installed_mlx() -> None:
    assert "std::min(2 * size, size + 2 * page_size_)" in header("backend/common/buffer_cache.h")


def test_the_rules_were_read_from_the_installed_mlx_version() -> None:
    core = pytest.importorskip("mlx.core")
    installed = tuple(map(int, core.__version__.split(".")[:2]))
    assert installed <= MLX_VERSION[:2], "read MLX's sources again: docs/trace-rules.md names them"
