"""Parts and totals of an estimate, under every runtime, for every sample."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.cli.render.views.text import rows, weight_rows
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.devices import find_device
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.runtimes.registry import list_runtimes
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import with_runtime
from tests.selection import quick

SAMPLES = sorted((Path(__file__).parents[2] / "sample_configs").glob("*.yaml"))


# A mixture, a window, a recurrence, latent attention, shared keys and values.
QUICK = (
    "deepseek-v2-lite",
    "gemma-3n-e4b",
    "gpt-oss-20b",
    "qwen3-next-80b-a3b-4bit",
    "qwen3-vl-4b",
)


@pytest.mark.parametrize("path", quick(SAMPLES, QUICK))
def test_parts_add_up_and_none_is_above_its_total(path: Path) -> None:
    checkpoint, faults = open_checkpoint(str(path)), []
    for machine in ("m4-max-36", "h100-80"):
        sized = size(checkpoint, device=find_device(machine), method="formula")
        for runtime in list_runtimes():
            workload = Workload(
                prompt_tokens=3000,
                max_tokens=100,
                batch=2,
                prefill_step=runtime.prefill_step,
                kv_bits=runtime.kv_bits,
                quantized_kv_start=runtime.quantized_kv_start,
            )
            try:
                result = estimate(with_runtime(sized, runtime), workload, advises=False)
            except UnsupportedError:
                continue
            faults += [f"{runtime.name} on {machine}: {fault}" for fault in _faults(result)]
    assert not faults


def _faults(result: Estimate) -> Iterator[str]:
    """Yield what in an answer contradicts something else in it."""
    peak = result.peak_bytes
    total = sum(nbytes for _, nbytes, _ in rows(result))
    if total != peak:
        yield f"its components are {total} bytes, its peak {peak}"
    low, high = result.peak_range_bytes
    if not low <= peak <= high:
        yield "the peak is not in its range"
    if result.needed_bytes != peak + result.components.margin.bytes:
        yield "the need is not the peak and the margin"
    yield from _faults_of_weights(result)
    yield from _faults_of_memories(result)


def _faults_of_weights(result: Estimate) -> Iterator[str]:
    weights, memories = result.components.weights, result.memories or ()
    if sum(weights.by_part.values()) != weights.bytes:
        yield "the parts of the weights are not the weights"
    kept = weights.kept_by_part
    if kept and sum(kept.values()) != weights.loaded_bytes:
        yield "the parts that are kept are not the loaded weights"
    # Of two memories the peak and its weights are those of the GPU.
    resident = sum(share.weights_bytes for share in memories) or weights.resident_bytes
    if weights.loaded_bytes > resident:
        yield "more is loaded than resident"
    for name, nbytes in weight_rows(result):
        if nbytes > resident and "on disk" not in name:
            yield f"{name}: {nbytes} bytes of weights that are {resident}"


def _faults_of_memories(result: Estimate) -> Iterator[str]:
    for share in result.memories or ():
        own = share.weights_bytes + share.cache_bytes + share.state_bytes + share.compute_bytes
        if own != share.total_bytes:
            yield f"{share.name}: its parts are not its total"
        if share.name == "GPU" and share.total_bytes != result.peak_bytes:
            yield "the GPU's total is not the peak"
