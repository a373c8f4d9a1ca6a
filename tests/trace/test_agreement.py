"""Formula and trace are compared: a change in either of them shows here."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("mlx_lm")

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.mlx.kv_cache import kv_cache, state_bytes
from memfit.estimators.runtimes.facets import runs_kv_bits
from memfit.estimators.runtimes.mlx_lm_trace import ClassTrace
from memfit.estimators.sizing.opening import size
from tests.selection import FEW_CONFIGS, QUICK_SAMPLES, quick

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "sample_configs").glob("*.yaml"))
CASES = sorted((ROOT / "tests" / "arch" / "cases").glob("*.json"))
WORKLOAD = Workload(prompt_tokens=700, max_tokens=3, prefill_step=256, batch=2)


# For CASES it follows: tests/arch/test_families.py compares the formula with mlx-lm's classes,
# tests/trace/test_shapes.py the trace.
@pytest.mark.parametrize("path", quick(SAMPLES, QUICK_SAMPLES), ids=lambda path: path.stem)
def test_formula_and_trace_agree(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    formula = size(checkpoint, device=None, method="formula")
    trace = ClassTrace(checkpoint, None, formula.model.dtype)
    # mlx-lm's gemma2.py cannot add the mask of a batch to its scores of grouped heads.
    workload = replace(WORKLOAD, batch=1) if path.stem == "gemma-2-2b" else WORKLOAD
    shapes = trace.shapes(workload)
    assert shapes.weight_bytes == formula.footprint.loaded_bytes
    assert shapes.kv_bytes == kv_cache(formula.model, workload).nbytes
    assert shapes.ssm_bytes == state_bytes(formula.model, workload.batch)


@pytest.mark.parametrize("path", quick(SAMPLES, QUICK_SAMPLES), ids=lambda path: path.stem)
def test_kv_bits_that_reach_no_cache_change_no_class(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    formula = size(checkpoint, device=None, method="formula")
    trace = ClassTrace(checkpoint, None, formula.model.dtype)
    plain = Workload(prompt_tokens=700, max_tokens=3, prefill_step=256)
    asked = replace(plain, kv_bits=8, quantized_kv_start=0)
    changes = _kv_bytes(trace, asked) != _kv_bytes(trace, plain)
    assert runs_kv_bits(formula.runtime_model, plain) == changes


def _kv_bytes(trace: ClassTrace, workload: Workload) -> int | None:
    try:
        return trace.shapes(workload).kv_bytes
    except UnsupportedError:
        return None


@pytest.mark.parametrize("mode", ["affine", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_formula_and_trace_agree_on_a_quantization_block(name: str, mode: str) -> None:
    sizes = {"affine": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
    bits, group = sizes[mode]
    config = json.loads((CASES[0].parent / f"{name}.json").read_text())
    config["quantization"] = {"bits": bits, "group_size": group, "mode": mode}
    checkpoint = Checkpoint(id=name, source="config", config=config, config_name=name)
    formula, traced = (
        size(checkpoint, device=None, method=method) for method in ("formula", "trace")
    )
    assert traced.footprint.loaded_bytes == formula.footprint.loaded_bytes
    assert traced.runtime_model.basis("workspace", WORKLOAD)[0] == "traced"


@pytest.mark.parametrize("path", quick(CASES, FEW_CONFIGS), ids=lambda path: path.stem)
def test_formula_and_trace_agree_on_foreign_quantisation_methods(path: Path) -> None:
    config = json.loads(path.read_text())
    # Each family with one of them, each of them with many families.
    methods = ("awq", "gptq", "mxfp4", "compressed-tensors")
    method = methods[CASES.index(path) % len(methods)]
    block = {"quant_method": method, "bits": 4, "group_size": 32, "format": "pack-quantized"}
    config["quantization_config"] = block
    checkpoint = Checkpoint(id=path.name, source="config", config=config, config_name=path.name)
    formula = size(checkpoint, device=None, method="formula")
    trace = ClassTrace(checkpoint, None, formula.model.dtype)
    assert sum(trace.built("metal").weights.values()) == formula.footprint.loaded_bytes
