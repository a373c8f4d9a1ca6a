"""The constants of the runtime and of MLX's scheduler, compared with mlx-lm's own source."""

import ast
import importlib.util
from pathlib import Path

import pytest

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import GpuClass
from memfit.estimators.mlx.scheduler import (
    CPU_DISPATCHES_PER_TASK,
    MAX_ACTIVE_TASKS,
    BatchLimits,
    command_buffer_limits,
)
from memfit.estimators.runtimes.registry import get_runtime, list_runtimes


def mlx_lm_source(name: str) -> ast.Module:
    """Return a file of mlx-lm, read and not imported: its import takes over a second."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        pytest.skip("mlx-lm is not installed")
    return ast.parse((Path(spec.origin).parent / name).read_text(encoding="utf-8"))


def named(source: ast.AST, name: str) -> ast.FunctionDef | ast.ClassDef:
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"mlx-lm has no {name}")


def constants(source: ast.AST) -> dict[str, object]:
    """Return the plain assignments of constants in a module or class."""
    return {
        target.id: node.value.value
        for node in ast.iter_child_nodes(source)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_prefill_constants_are_the_defaults_of_generate_step() -> None:
    source = mlx_lm_source("generate.py")
    step = named(source, "generate_step")
    assert isinstance(step, ast.FunctionDef)
    defaults = {
        argument.arg: default.value
        for argument, default in zip(step.args.kwonlyargs, step.args.kw_defaults, strict=True)
        if isinstance(default, ast.Constant)
    }
    runtime = get_runtime("mlx-lm")
    assert defaults["prefill_step_size"] == runtime.prefill_step
    assert defaults["kv_group_size"] == runtime.kv_group_size
    assert constants(source)["DEFAULT_QUANTIZED_KV_START"] == runtime.quantized_kv_start


@pytest.mark.parametrize("cache", ["KVCache", "QuantizedKVCache", "RotatingKVCache"])
def test_caches_grow_by_the_step_of_their_class(cache: str) -> None:
    source = mlx_lm_source("models/cache.py")
    assert constants(named(source, cache))["step"] == get_runtime("mlx-lm").kv_step


def test_workload_defaults_are_those_of_mlx_lm() -> None:
    runtime, workload = get_runtime("mlx-lm"), Workload(prompt_tokens=1)
    assert workload.prefill_step == runtime.prefill_step
    assert workload.kv_group_size == runtime.kv_group_size
    assert workload.quantized_kv_start == runtime.quantized_kv_start


def test_an_unknown_runtime_is_reported_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no runtime is called 'exllama'; nearest: "):
        get_runtime("exllama")


# mlx/backend/metal/device.cpp, Device::Device.
@pytest.mark.parametrize(
    ("gpu_class", "limits"),
    [("p", (20, 40)), ("g", (40, 40)), ("s", (50, 50)), ("d", (50, 50)), (None, (40, 40))],
)
def test_command_buffers_close_at_the_limits_of_the_gpu_class(
    gpu_class: GpuClass | None, limits: tuple[int, int]
) -> None:
    assert command_buffer_limits(gpu_class) == BatchLimits(*limits)


def test_at_most_ten_tasks_are_in_flight() -> None:
    # mlx/transforms.cpp, MAX_ACTIVE_TASKS; mlx/backend/cpu/encoder.h, DISPATCHES_PER_TASK.
    assert MAX_ACTIVE_TASKS == 10
    assert CPU_DISPATCHES_PER_TASK == 10


def test_every_row_has_its_source_and_allocation() -> None:
    for runtime in list_runtimes():
        assert runtime.source
        assert runtime.allocates
        assert runtime.keeps
