"""Steps are followed as the graph that they were lowered from."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import peak
from memfit.estimators.trace.recording import GraphError
from memfit.estimators.trace.replay import CallPeak
from memfit.estimators.trace.traced_model import TracedModel
from tests.programs.following import followed
from tests.selection import quick

TESTS = Path(__file__).parents[1]
DESCRIBED = {path.stem: path for path in sorted((TESTS / "arch" / "cases").glob("*.json"))}
UNDESCRIBED = {
    f"undescribed-{case['model_type']}-{index}": case
    for index, case in enumerate(json.loads((TESTS / "trace" / "cases.json").read_text()))
}
# With layouts that depend on donations, with states that the next call makes.
FEW = ("falcon_h1", "qwen3_next")
DEVICES = {
    "metal": find_device("m4-max-64"),
    "matrix units": find_device("m5-max-64"),
    "cuda": Device("H100", "cuda", 0, 0, None, "flag", None, 90),
    "cpu": Device("this host", "cpu", 0, 0, None, "flag"),
}
# Chunks that are no multiple of anything, an empty last chunk, a cache that grows in decoding.
WORKLOADS = (
    Workload(prompt_tokens=1300, max_tokens=100, prefill_step=512),
    Workload(prompt_tokens=1025, max_tokens=1, prefill_step=512),
    Workload(prompt_tokens=40, max_tokens=300),
)


def config_of(name: str) -> dict[str, Any]:
    config = UNDESCRIBED.get(name) or json.loads(DESCRIBED[name].read_text())
    return dict(config)


def what(call: CallPeak[Any]) -> tuple[Any, ...]:
    # Buffers of as many bytes are in no order.
    return (
        *(call.part, call.nbytes, call.operation, dict(call.alive)),
        *(call.largest_buffer_bytes, call.batch_bytes),
    )


def built(name: str, device: Device, bits: int | None = None) -> TracedModel:
    try:
        return TracedModel(
            config_of(name), device.backend, quantize=converted(bits) if bits else None
        )
    except UnsupportedError as error:
        # tests/trace says which classes need another package, or fail to be quantised.
        pytest.skip(str(error))


def assert_followed(model: TracedModel, workload: Workload, device: Device) -> None:
    nax = device.generation is not None and device.generation >= 17
    try:
        trace, _ = model.record(workload, TraceTarget(backend=device.backend, nax=nax))
    except GraphError as error:
        pytest.skip(str(error))
    wanted = [what(call) for call in peak(trace, device).calls]
    assert [what(call) for call in followed(trace, device)] == wanted


@pytest.mark.parametrize("name", quick([*DESCRIBED, *UNDESCRIBED], FEW))
def test_each_call_of_each_class_has_the_peak_of_its_graph(name: str) -> None:
    assert_followed(built(name, DEVICES["metal"]), WORKLOADS[0], DEVICES["metal"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*DESCRIBED, *UNDESCRIBED])
def test_each_call_of_each_packed_class_has_the_peak_of_its_graph(name: str) -> None:
    model = built(name, DEVICES["metal"], 4)
    for workload in WORKLOADS:
        assert_followed(model, workload, DEVICES["metal"])


@pytest.mark.parametrize("kind", quick(DEVICES, ["cpu"]))
@pytest.mark.parametrize("name", quick(["deepseek_v3", "gemma3_text", "llama"], ["llama"]))
def test_the_rules_of_each_backend_are_followed(name: str, kind: str) -> None:
    device = DEVICES[kind]
    assert_followed(built(name, device, 4), WORKLOADS[0], device)


SETTINGS = {
    "batch": {"batch": 3},
    "bits": {"kv_bits": 8, "kv_group_size": 32},
    "bits later": {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 700},
    "window": {"max_kv_size": 512},
}


@pytest.mark.parametrize("kind", quick(SETTINGS, ["batch", "bits later"]))
@pytest.mark.parametrize("name", quick(["llama", "qwen3_next"], ["llama"]))
def test_batches_and_other_caches_are_followed(name: str, kind: str) -> None:
    settings: dict[str, Any] = SETTINGS[kind]
    workload = Workload(prompt_tokens=1300, max_tokens=100, prefill_step=512, **settings)
    assert_followed(built(name, DEVICES["metal"]), workload, DEVICES["metal"])
