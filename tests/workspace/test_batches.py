"""A batch of mlx-lm's generator by formula, compared with the trace by the CPU's rules."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the classes that are traced are mlx-lm's")

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import peak as traced_peak
from memfit.estimators.trace.traced_model import TracedModel
from memfit.estimators.weights.derived import QuantizationPlan
from memfit.estimators.workspace.peak import peak

HOST = Device("this host", "cpu", 0, 0, None, "flag")
CASES = Path(__file__).parents[1] / "arch" / "cases"
PACKED = Quantization(4, 32)


@pytest.mark.parametrize(
    ("name", "batch"),
    # Norms of queries and keys; a state that the first token does not need yet.
    [("qwen3", 4), ("mamba2", 2)],
)
def test_both_phases_of_a_batch_are_near_the_trace(name: str, batch: int) -> None:
    config: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    workload = Workload(prompt_tokens=300, max_tokens=6, prefill_step=128, batch=batch)
    trace, shapes = TracedModel(config, "cpu", quantize=PACKED).record(
        workload, TraceTarget(backend="cpu")
    )
    traced = traced_peak(trace, HOST)
    derived = peak(
        build_model(config, "config.json"),
        workload,
        resident_bytes=shapes.weight_bytes,
        plan=QuantizationPlan(PACKED, converting=True),
        device=HOST,
    )
    weights = shapes.weight_bytes
    for phase in ("prefill_bytes", "decode_bytes"):
        by_trace, by_formula = (getattr(each, phase) - weights for each in (traced, derived))
        assert 0.97 * by_trace <= by_formula <= 1.1 * by_trace
