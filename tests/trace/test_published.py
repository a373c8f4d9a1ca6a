"""Traced peaks, compared with published ones.

For Metal mlx-lm's BENCHMARKS.md, an M4 Max with 64 GB; for CUDA mlx pull request 3077.
"""

import pytest

from benchmarks.accuracy import M4_MAX, PUBLISHED, against_measured, published_run
from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import peak
from memfit.estimators.weights.derived import derive
from memfit.estimators.workspace.peak import peak as formula_peak
from tests.models import published_config
from tests.trace.tracing import record

pytest.importorskip("mlx_lm", reason="the classes that are traced are mlx-lm's")

# Of Qwen/Qwen3-4B-Instruct-2507 and Qwen/Qwen3-30B-A3B-Instruct-2507, but for their rotary base.
CONFIGS = {"qwen3": published_config("qwen3-4b"), "qwen3_moe": published_config("qwen3-30b-a3b")}
ROWS = [
    pytest.param(model, *row, marks=() if row[:2] == (4, 64) else pytest.mark.exhaustive)
    for model, rows in PUBLISHED.items()
    for row in rows
]


@pytest.mark.parametrize(("model", "bits", "group", "published_gb"), ROWS)
def test_a_published_peak_is_reproduced(
    model: str, bits: int, group: int, published_gb: float
) -> None:
    found = published_run(CONFIGS[model], bits, group)
    published = published_gb * 1e9
    assert abs(found.nbytes / published - 1) < 0.002
    residual = published - (found.nbytes - found.workspace_bytes)
    assert abs(found.workspace_bytes / residual - 1) < 0.015


def test_compiled_functions_that_overwrite_inputs_need_less() -> None:
    config = {**CONFIGS["qwen3"], "num_hidden_layers": 8}
    workload = Workload(prompt_tokens=2048)
    before, since = (
        peak(
            record(config, workload, target=TraceTarget(versions=MlxVersions(mlx=version))), M4_MAX
        ).nbytes
        for version in ((0, 30, 0), (0, 30, 1))
    )
    assert since < before


def _on_cuda(model: str, gpu: str) -> int:
    device, versions = find_device(gpu), MlxVersions(mlx=(0, 31, 0))
    target = TraceTarget(backend="cuda", compute_capability=device.generation, versions=versions)
    workload = Workload(prompt_tokens=1024, max_tokens=128)
    return peak(record(CONFIGS[model], workload, target=target), device).nbytes


@pytest.mark.parametrize("gpu", ["h100-80", pytest.param("b200", marks=pytest.mark.exhaustive)])
def test_a_published_peak_is_reproduced_where_mlx_waits_for_the_gpu(gpu: str) -> None:
    assert _on_cuda("qwen3_moe", gpu) == pytest.approx(64.219e9, abs=0.5e6)


def test_a_gpu_that_runs_graphs_before_mlx_waits_stays_below_the_trace() -> None:
    device, versions = find_device("h100-80"), MlxVersions(mlx=(0, 31, 0))
    model = build_model({**CONFIGS["qwen3"], "torch_dtype": "bfloat16"}, "config.json")
    workload = Workload(prompt_tokens=1024, max_tokens=128)
    least, most = (
        formula_peak(
            model,
            workload,
            resident_bytes=derive(model, None).loaded_bytes,
            plan=None,
            device=device,
            versions=versions,
            keeps_up=keeps_up,
        ).nbytes
        for keeps_up in (True, False)
    )
    assert least < 10.007e9 < most
    assert _on_cuda("qwen3", "h100-80") == pytest.approx(most, rel=0.01)


def test_a_name_that_no_case_has_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        against_measured(1, "no-such-case")
    found = capsys.readouterr()
    assert (stopped.value.code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert "no case of tests/arch/cases" in found.err
