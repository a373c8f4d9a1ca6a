"""The formula's workspace and the trace's, where the peak is in prefill on Metal."""

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="the classes that are traced are mlx-lm's")

from memfit.estimators.base.quantization import Quantization
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


# Products summed from parts, a layer for each batch of work, states before the first chunk, tokens
# in a loop; and layers that cache what others make.
CLOSE: tuple[tuple[str, int, int | None], ...] = (
    *(("llama-3.2-3b.yaml", 65, None), ("phi-4-mini.yaml", 1025, 4)),
    *(("falcon-h1-7b.yaml", 65, None), ("jamba.json", 513, None), ("hunyuan.json", 513, None)),
)


@pytest.mark.parametrize(("name", "tokens", "bits"), CLOSE)
def test_what_depends_on_mlxs_own_steps_is_within_a_tenth(
    name: str, tokens: int, bits: int | None
) -> None:
    folder = SAMPLES if name.endswith(".yaml") else SAMPLES.parent / "tests" / "arch" / "cases"
    checkpoint = open_checkpoint(str(folder / name))
    workload = Workload(prompt_tokens=tokens, prefill_step=2048 if tokens != 513 else 256)
    quantize = Quantization(bits, 64) if bits else None
    by_method = (
        size(checkpoint, device=M4_MAX_64, quantize=quantize, method=method)
        for method in ("formula", "trace")
    )
    derived, traced = (sized.figures_for(workload).moment for sized in by_method)
    assert abs(derived.workspace_bytes - traced.workspace_bytes) * 10 <= traced.workspace_bytes


@pytest.mark.parametrize("path", quick(TRACED, QUICK), ids=lambda path: path.stem)
def test_the_formula_workspace_is_within_its_stated_error_of_the_trace(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    by_method = (size(checkpoint, device=M4_MAX_64, method=m) for m in ("formula", "trace"))
    derived, traced = (sized.figures_for(WORKLOAD).moment for sized in by_method)
    off = 100 * abs(derived.workspace_bytes - traced.workspace_bytes)
    assert off <= ERROR_PERCENT * traced.workspace_bytes
