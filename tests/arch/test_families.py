"""Every family, compared with mlx-lm's own class built lazily from the same config.

A case is a small config in cases/; its name is the file's. Add a file to add a case. `make test`
runs one for each kind of layer.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import FAMILIES, build_model
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import kv_cache, state_bytes
from memfit.estimators.weights.derived import QuantizationPlan, derive

pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
from tests.oracle import Oracle, cache_bytes
from tests.selection import quick

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


@dataclass(frozen=True)
class Built:
    """A case as memfit and as mlx-lm build it, once for all tests of it.

    The figures are those before the first call: a call may add arrays to the modules (gemma3n).
    """

    config: dict[str, Any]
    model: Model
    oracle: Oracle
    parameters: int
    weight_bytes: int
    names: frozenset[str]


@pytest.fixture(scope="module", params=quick(CASES), ids=lambda case: case.stem)
def built(request: pytest.FixtureRequest) -> Built:
    config = _load(request.param)
    oracle = Oracle(config)
    return Built(
        config,
        build_model(config, "config.json"),
        oracle,
        oracle.parameters(),
        oracle.weight_bytes(),
        frozenset(oracle.tensors()),
    )


def test_parameters_and_weight_bytes_equal_the_model_class(built: Built) -> None:
    derived = derive(built.model, None)
    assert derived.parameters - derived.unloaded_parameters == built.parameters
    assert derived.nbytes - derived.unloaded == built.weight_bytes
    paths = {path for path, module in built.model.all_modules() if module.loaded}
    assert paths == {_module_path(name) for name in built.names}


@pytest.mark.parametrize(
    "quantization",
    [Quantization(4, 64), Quantization(6, 32), Quantization(4, 32, "mxfp4")],
    ids=str,
)
def test_quantised_bytes_equal_conversion_by_mlx_lm(
    built: Built, quantization: Quantization
) -> None:
    oracle = Oracle(built.config)
    oracle.quantize(quantization.bits, quantization.group_size, quantization.mode)
    derived = derive(built.model, QuantizationPlan(quantization, converting=True))
    assert derived.nbytes - derived.unloaded == oracle.weight_bytes()


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_cache_bytes_equal_the_runtime(built: Built, workload: Workload) -> None:
    kv, state = cache_bytes(built.oracle.run(workload))
    assert kv_cache(built.model, workload).nbytes == kv
    assert state_bytes(built.model, workload.batch) == state


@pytest.mark.parametrize("start", [0, 25])
def test_a_quantised_cache_equals_the_runtime_or_is_rejected_where_it_fails(
    built: Built, start: int
) -> None:
    model = built.model
    workload = Workload(
        prompt_tokens=40,
        max_tokens=2,
        prefill_step=16,
        kv_bits=8,
        kv_group_size=32,
        quantized_kv_start=start,
    )
    try:
        expected = cache_bytes(built.oracle.run(workload))
    except Exception:  # noqa: BLE001 - whatever mlx-lm raises, it cannot run this
        with pytest.raises(UnsupportedError):
            kv_cache(model, workload)
    else:
        assert (kv_cache(model, workload).nbytes, state_bytes(model, 1)) == expected


def test_the_spec_states_a_norm_of_queries_and_keys(built: Built) -> None:
    for index, layer in enumerate(built.model.layers):
        prefix = f"{built.model.layers_path}.{index}."
        inner = (name.removeprefix(prefix) for name in built.names if name.startswith(prefix))
        normed = any(re.search(r"(q|query)_(layer)?norm", name) for name in inner)
        assert any(getattr(mixer, "qk_norm", False) for mixer in layer.mixers) is normed


def test_every_described_model_type_has_a_case() -> None:
    described = {_load(case)["model_type"] for case in CASES}
    # Those of mlx-vlm alone: test_vision_wrappers.py.
    of_mlx_lm = {kind for kind, module in FAMILIES.items() if module != "vision_wrappers"}
    assert described >= of_mlx_lm


def _module_path(name: str) -> str:
    """The module that a parameter belongs to; a parameter outside leaf modules is its own."""
    head, _, last = name.rpartition(".")
    return head if last in {"weight", "bias", "scales", "biases"} else name
