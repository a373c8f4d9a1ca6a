"""Recorded calls followed by their steps, with plain numbers, as the trace follows their graphs."""

from collections.abc import Iterator

from memfit.estimators.base import dtypes
from memfit.estimators.base.workload import CallPhase
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import CHUNKS, PlannedCall, held_samples
from memfit.estimators.programs.answers import functions
from memfit.estimators.programs.lowering import lower
from memfit.estimators.programs.machine import Machine
from memfit.estimators.programs.program import program
from memfit.estimators.programs.steps import Lowered
from memfit.estimators.trace.graph_format import Call, Trace
from memfit.estimators.trace.replay import CallPeak


def followed(trace: Trace, device: Device) -> Iterator[CallPeak[CallPhase]]:
    """Yield what `trace.peak.peak` has of each call."""
    machine, last, reached = Machine(device), None, -1
    known = functions(device, trace.mlx_version)
    first = next((c.position for c in trace.calls if c.phase not in CHUNKS), 0)
    for call in trace.calls:
        lowered = _lowered(call, device, trace, last)
        # One block, as if all of it came before the layers.
        arrays, steps = [-1] * len(call.arrays), [None] * len(lowered.steps)
        yield machine.call_peak(
            program(lowered, arrays, steps, [], known),
            {},
            PlannedCall(call.phase, call.tokens, call.position),
            jumped=call.position != reached,
            samples=held_samples(max(0, call.position - first)),
        )
        if call.phase in CHUNKS:
            machine.wait()
        last, reached = lowered, call.position + call.tokens


def _lowered(call: Call, device: Device, trace: Trace, last: Lowered | None) -> Lowered:
    if last is None:
        return lower(call, device, trace.mlx_version)
    caches = [call.arrays[i] for i in call.of_role("cache")]
    wanted = [(array.shape, dtypes.BITS[array.dtype] // 8) for array in caches]
    left = [(entry.shape, entry.itemsize) for entry in last.held]
    found = last.leaves.handed_over(left, wanted)
    return lower(call, device, trace.mlx_version, found)
