"""Programs of batches, whose caches count their tokens behind the last layer, at full depth.

The graphs are those of qwen3, recorded with batches (`ClassPlan.batches`) by mlx-lm 0.32.2: a class
that formulas describe, so that the recording can be compared with them too.
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

DATA = Path(__file__).parent / "data" / "qwen3.json.xz"
WORKLOADS = (
    Workload(prompt_tokens=700, max_tokens=30, batch=3, prefill_step=256),
    Workload(prompt_tokens=9000, max_tokens=100, batch=8),
    Workload(prompt_tokens=5431, max_tokens=17, batch=2, prefill_step=1024),
    Workload(prompt_tokens=40, max_tokens=600, batch=5),
)


@pytest.fixture(scope="module")
def model() -> RecordedModel:
    recorded = decoded(lzma.decompress(DATA.read_bytes()))
    return recorded_model(recorded, {**QWEN3_4B, **recorded.fixed, "num_hidden_layers": 12})


@pytest.mark.parametrize("packing", [None, Quantization(4, 64)])
def test_a_few_layers_of_a_batch_stand_for_all(
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
