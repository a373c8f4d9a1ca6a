"""The formula's workspace and the trace's, where the peak is in prefill on Metal."""

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="the classes that are traced are mlx-lm's")

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.sizing.sized_model import size
from memfit.estimators.workspace.peak import ERROR_PERCENT
from tests.selection import quick

M4_MAX_64 = Device("M4 Max", "metal", 64 << 30, 55662788608, None, "flag", "s", 16)
# Two chunks: the second also has the caches of the first.
WORKLOAD = Workload(prompt_tokens=4096)
SAMPLES = Path(__file__).parents[2] / "sample_configs"
# Their classes loop over tokens in Python: minutes and gigabytes to trace.
LOOPED = {"jamba-1.5-mini", "mamba-2.8b", "recurrentgemma-2b", "rwkv7-2.9b"}
# One sample for each kind of layer; phi-4-mini packs queries, keys and values in one product.
QUICK = (
    *("deepseek-v2-lite", "gemma-3n-e4b", "gpt-oss-20b", "lfm2.5-8b-a1b-4bit", "llama-4-scout"),
    *("phi-4-mini", "qwen3-4b-4bit", "qwen3-next-80b-a3b-4bit", "qwen3-vl-4b"),
)
TRACED = sorted(path for path in SAMPLES.glob("*.yaml") if path.stem not in LOOPED)


@pytest.mark.parametrize("path", quick(TRACED, QUICK), ids=lambda path: path.stem)
def test_the_formula_workspace_is_within_its_stated_error_of_the_trace(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    by_method = (size(checkpoint, device=M4_MAX_64, method=m) for m in ("formula", "trace"))
    derived, traced = (sized.figures_for(WORKLOAD).moment for sized in by_method)
    off = 100 * abs(derived.workspace_bytes - traced.workspace_bytes)
    assert off <= ERROR_PERCENT * traced.workspace_bytes
