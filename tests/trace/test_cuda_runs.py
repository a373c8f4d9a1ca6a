"""Peaks that MLX measured on an H100, against the bound by trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.call_plan import CHUNKS
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import peak
from memfit.estimators.trace.traced_model import TracedModel
from tests.models import sample_config
from tests.selection import quick

RUNS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "cuda_runs.json").read_text(encoding="utf-8")
)["rows"]
ALONE = [run for run in RUNS if not run["sequences"]]
# Its windows have boolean masks.
MASKED = [run for run in ALONE if run["model"] == "gpt-oss-20b"]
# MLX was as far ahead of the GPU as it goes, and cuBLAS took nothing.
EQUAL = {("llama-3.2-3b", 4), ("llama-3.1-8b", 4), ("gpt-oss-20b", 4)}
# What cuBLAS and cuDNN choose when they run is in no source.
LIBRARIES_PERCENT = 7


@pytest.mark.parametrize(
    "run", quick(ALONE, MASKED), ids=lambda run: f"{run['model']}-{run['bits']}-{run['prompt']}"
)
def test_no_prefill_on_an_h100_is_above_the_bound_but_for_what_libraries_take(
    run: dict[str, Any],
) -> None:
    pytest.importorskip("mlx_lm", reason="the class that is traced is mlx-lm's")
    config = sample_config(run["model"])
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    packing = Quantization(run["bits"], 64) if run["bits"] < 16 else None
    workload = Workload(
        prompt_tokens=run["prompt"], max_tokens=run["generated"], prefill_step=run["step"]
    )
    model = TracedModel(config, "cuda", quantize=packing)
    trace, _ = model.record(workload, TraceTarget(backend="cuda"))
    found = peak(trace, find_device("h100-80"))
    above, held = (
        max(nbytes for part, nbytes in parts.items() if part in CHUNKS) - found.weight_bytes
        for parts in (found.parts, found.held)
    )
    assert max(run["prefill"]) * 100 <= (100 + LIBRARIES_PERCENT) * above
    assert max(run["held"]) * 100 <= (100 + LIBRARIES_PERCENT) * held
    if (run["model"], run["bits"]) in EQUAL:
        assert abs(run["prefill"][-1] - above) * 10_000 < above
