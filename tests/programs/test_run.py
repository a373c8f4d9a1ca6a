"""Programs of a few layers are followed as the whole graph of a model; no MLX is needed."""

from collections.abc import Iterator

import pytest

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.call_plan import CHUNKS, planned_calls
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.programs.assembly import assembled
from memfit.estimators.programs.dimensions import call_sizes
from memfit.estimators.programs.library import RecordedModel, find, recorded_model
from memfit.estimators.programs.run import Programs, shortened
from memfit.estimators.programs.select import structure_of
from memfit.estimators.runtimes.by_class import trace_target
from memfit.estimators.trace.replay import CallPeak, CallReplay
from memfit.estimators.trace.schedule import unmerged
from tests.recording.configs import CONFIGS
from tests.selection import quick

# The first makes the programs, the others are at sizes that they were not made at.
WORKLOADS = (
    Workload(prompt_tokens=9000, max_tokens=100),
    Workload(prompt_tokens=5431, max_tokens=17, prefill_step=1024),
    Workload(prompt_tokens=40, max_tokens=600),
)
MLX = MlxVersions()
# Their kernels share a buffer that another array still has, so references are counted: no code.
COUNTED = ("spark2_5-0",)
PACKINGS = {"plain": None, "packed": Quantization(4, 64)}


def model_of(name: str) -> RecordedModel:
    config = CONFIGS[name]
    recorded = find(config["model_type"])
    assert recorded is not None
    return recorded_model(recorded, config)


def replayed(
    model: RecordedModel, packing: Quantization | None, device: Device, workload: Workload
) -> Iterator[CallPeak[CallPhase]]:
    """Yield the calls of a run as the trace follows graphs of all layers."""
    target = trace_target(device, MLX)
    replay, reached = CallReplay(device, target.versions.mlx), -1
    variant = model.variant(packing, device.backend)
    planned = planned_calls(workload, target.versions)
    first = next((call.position for call in planned if call.phase not in CHUNKS), 0)
    for call in planned:
        sizes = call_sizes(
            model.packed_sizes(packing), model.recorded.attention, workload, call, target
        )
        structure = structure_of(model.recorded, variant, sizes)
        graph = assembled(model.recorded, structure, model.kinds, sizes, call).call
        yield replay.follow(
            unmerged(graph),
            jumped=call.position != reached,
            sampled=max(0, call.position - first),
        )
        if call.phase in CHUNKS:
            replay.wait()
        reached = call.position + call.tokens


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("chip", quick(["m4-max-64", "m5-max-64"], ["m4-max-64"]))
@pytest.mark.parametrize("name", quick(CONFIGS, ["talkie-0"]))
def test_each_call_has_the_peak_of_its_whole_graph(name: str, chip: str, packing: str) -> None:
    model, device, packed = model_of(name), find_device(chip), PACKINGS[packing]
    programs = Programs(
        model.recorded,
        model.variant(packed, device.backend),
        model.kinds,
        device,
        trace_target(device, MLX),
    )
    for workload in WORKLOADS:
        planned, sizes = planned_calls(workload, MLX), model.packed_sizes(packed)
        named = programs.peaks(sizes, workload, planned, named=True)
        by_code = programs.peaks(sizes, workload, planned)
        whole = list(replayed(model, packed, device, workload))
        assert [dict(call.alive) for call in named] == [dict(call.alive) for call in whole]
        for found in (named, by_code):
            assert list(map(figures, found)) == list(map(figures, whole))
        assert any(call.alive for call in by_code) == (name in COUNTED)


def figures(call: CallPeak[CallPhase]) -> tuple[object, ...]:
    """Return what is known of a call at any speed."""
    return (
        *(call.nbytes, call.operation, call.largest_buffer_bytes),
        *(call.batch_bytes, call.held_bytes, max(call.curve)),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_few_layers_stand_for_all_of_a_model(name: str) -> None:
    kinds = model_of(name).kinds
    depth = shortened(kinds)
    assert tuple(depth.kinds[layer] for layer in depth.like) == kinds
    assert len(depth.kinds) <= 18
