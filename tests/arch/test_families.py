"""Every family, compared with mlx-lm's own class built lazily from the same config.

A case is a small config in cases/; its name is the file's. Add a file to add a case.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.registry import FAMILIES, build_model
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import kv_cache
from memfit.estimators.mlx.recurrent_state import state_bytes
from memfit.estimators.weights import QuantizationPlan, derive

pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
from tests.oracle import Oracle, cache_bytes

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))

WORKLOADS = {
    "one token": Workload(prompt_tokens=1),
    "inside a step": Workload(prompt_tokens=17, max_tokens=3),
    "across chunks": Workload(prompt_tokens=50, max_tokens=2, prefill_step=16),
    "batch of three": Workload(prompt_tokens=40, max_tokens=1, prefill_step=24, batch=3),
    "across a step in decode": Workload(prompt_tokens=255, max_tokens=3, prefill_step=128),
    "a chunk of one at the end": Workload(prompt_tokens=34, max_tokens=2, prefill_step=16),
    "odd chunks": Workload(prompt_tokens=300, max_tokens=1, prefill_step=100),
    "limited cache": Workload(prompt_tokens=70, max_tokens=3, prefill_step=32, max_kv_size=24),
}


def _load(case: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(case.read_text())
    return config


@pytest.fixture(params=CASES, ids=lambda case: case.stem)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _load(request.param)


def test_parameters_and_weight_bytes_equal_the_model_class(config: dict[str, Any]) -> None:
    model, oracle = build_model(config, "config.json"), Oracle(config)
    derived = derive(model, None)
    assert derived.parameters - derived.unloaded_parameters == oracle.parameters()
    assert derived.nbytes - derived.unloaded == oracle.weight_bytes()
    paths = {path for path, module in model.all_modules() if module.loaded}
    assert paths == {_module_path(name) for name in oracle.tensors()}


@pytest.mark.parametrize(
    "quantization",
    [Quantization(4, 64), Quantization(6, 32), Quantization(4, 32, "mxfp4")],
    ids=str,
)
def test_quantised_bytes_equal_conversion_by_mlx_lm(
    config: dict[str, Any], quantization: Quantization
) -> None:
    model, oracle = build_model(config, "config.json"), Oracle(config)
    oracle.quantize(quantization.bits, quantization.group_size, quantization.mode)
    derived = derive(model, QuantizationPlan(quantization, converting=True))
    assert derived.nbytes - derived.unloaded == oracle.weight_bytes()


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_cache_bytes_equal_the_runtime(config: dict[str, Any], workload: Workload) -> None:
    model = build_model(config, "config.json")
    kv, state = cache_bytes(Oracle(config).run(workload))
    assert kv_cache(model, workload).nbytes == kv
    assert state_bytes(model, workload.batch) == state


@pytest.mark.parametrize("start", [0, 25])
def test_a_quantised_cache_equals_the_runtime_or_is_rejected_where_it_fails(
    config: dict[str, Any], start: int
) -> None:
    model = build_model(config, "config.json")
    workload = Workload(
        prompt_tokens=40,
        max_tokens=2,
        prefill_step=16,
        kv_bits=8,
        kv_group_size=32,
        quantized_kv_start=start,
    )
    try:
        expected = cache_bytes(Oracle(config).run(workload))
    except Exception:  # noqa: BLE001 - whatever mlx-lm raises, it cannot run this
        with pytest.raises(UnsupportedError):
            kv_cache(model, workload)
    else:
        assert (kv_cache(model, workload).nbytes, state_bytes(model, 1)) == expected


def test_the_spec_states_a_norm_of_queries_and_keys(config: dict[str, Any]) -> None:
    model, names = build_model(config, "config.json"), Oracle(config).tensors()
    for index, layer in enumerate(model.layers):
        prefix = f"{model.layers_path}.{index}."
        inner = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        normed = any(re.search(r"(q|query)_(layer)?norm", name) for name in inner)
        assert any(getattr(mixer, "qk_norm", False) for mixer in layer.mixers) is normed


def test_every_described_model_type_has_a_case() -> None:
    described = {_load(case)["model_type"] for case in CASES}
    assert described >= set(FAMILIES)


def _module_path(name: str) -> str:
    """The module a parameter belongs to; parameters of no leaf module are their own."""
    head, _, last = name.rpartition(".")
    return head if last in {"weight", "bias", "scales", "biases"} else name
