"""Programs of batches and of quantised caches, compared with whole graphs and with the trace.

The graphs are those of qwen3, a class that formulas describe: its plan with ``batches`` and
``quantised_caches``, recorded by mlx-lm 0.32.2 with MLX 0.32.
"""

import lzma
from pathlib import Path

import pytest

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.call_plan import planned_calls
from memfit.estimators.programs.graph import decoded
from memfit.estimators.programs.library import RecordedModel, recorded_model
from memfit.estimators.programs.run import Programs, shortened
from memfit.estimators.runtimes.by_class import trace_target
from tests.models import QWEN3_4B
from tests.programs.test_run import MLX, figures, replayed
from tests.selection import quick

DATA = Path(__file__).parent / "data" / "qwen3.json.xz"
WORKLOADS = (
    Workload(prompt_tokens=700, max_tokens=30, batch=3, prefill_step=256),
    Workload(prompt_tokens=9000, max_tokens=100, batch=8),
    Workload(prompt_tokens=5431, max_tokens=17, batch=2, prefill_step=1024),
    Workload(prompt_tokens=40, max_tokens=600, batch=5),
    Workload(prompt_tokens=9001, max_tokens=300, kv_bits=4, quantized_kv_start=5000),
    Workload(prompt_tokens=2500, max_tokens=40, kv_bits=8, quantized_kv_start=0),
)


@pytest.fixture(scope="module")
def model() -> RecordedModel:
    recorded = decoded(lzma.decompress(DATA.read_bytes()))
    return recorded_model(recorded, {**QWEN3_4B, **recorded.fixed, "num_hidden_layers": 12})


@pytest.mark.parametrize("packing", [None, Quantization(4, 64)])
def test_a_few_layers_stand_for_all_of_a_batch_or_with_kv_bits(
    model: RecordedModel, packing: Quantization | None
) -> None:
    device = find_device("m4-max-64")
    variant, target = model.variant(packing, device.backend), trace_target(device, MLX)
    programs = Programs(model.recorded, variant, model.kinds, device, target)
    for workload in WORKLOADS:
        planned, sizes = planned_calls(workload, MLX), model.packed_sizes(packing)
        named = programs.peaks(sizes, workload, planned, named=True)
        by_code = programs.peaks(sizes, workload, planned)
        whole = list(replayed(model, packing, device, workload))
        assert list(map(figures, named)) == list(map(figures, whole)), workload
        assert list(map(figures, by_code)) == list(map(figures, whole)), workload
    assert programs.depth == shortened(model.kinds)


@pytest.mark.parametrize("packing", [None, Quantization(4, 64), Quantization(8, 32)])
@pytest.mark.parametrize("chip", quick(["m4-max-64", "m5-max-64", "h100-80"], ["m4-max-64"]))
def test_calls_are_those_of_the_class_itself_to_the_byte(
    model: RecordedModel, packing: Quantization | None, chip: str
) -> None:
    pytest.importorskip("mlx_lm")
    from memfit.estimators.trace.peak import peak
    from memfit.estimators.trace.traced_model import TracedModel

    device = find_device(chip)
    variant, target = model.variant(packing, device.backend), trace_target(device, MLX)
    programs = Programs(model.recorded, variant, model.kinds, device, target)
    traced = TracedModel(dict(model.config), device.backend, quantize=packing)
    for workload in WORKLOADS:
        found = programs.peaks(model.packed_sizes(packing), workload, planned_calls(workload, MLX))
        trace, _ = traced.record(workload, target)
        wanted = {(call.part, call.position): call for call in peak(trace, device).calls}
        # The trace leaves out calls of one token where no buffer grows.
        same = [call for call in found if (call.part, call.position) in wanted]
        assert len(same) >= len(wanted), workload
        for call in same:
            assert figures(call) == figures(wanted[call.part, call.position]), workload
