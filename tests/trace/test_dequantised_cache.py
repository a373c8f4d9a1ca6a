"""What mx.dequantize allocates, compared with MLX's own graph and with real runs."""

from typing import Any

import pytest

from memfit.estimators.machine.device import ANY_CPU, ANY_MAC
from memfit.estimators.trace.dequantised_cache import (
    StoredFormat,
    StoredRows,
    dequantised_peak,
    dequantising_graph,
)
from memfit.estimators.trace.leaves import Leaf
from memfit.estimators.trace.recording import record_call
from tests.mlx_memory import settled_bytes
from tests.selection import quick

mx = pytest.importorskip("mlx.core")
ROWS, WIDTH = 1024, 64
STORED = StoredRows(ROWS, WIDTH)
PLAIN_BYTES = 2 * ROWS * WIDTH


def quantised(bits: int, count: int) -> list[Any]:
    values = [mx.random.normal((ROWS, WIDTH)).astype(mx.bfloat16) for _ in range(count)]
    made = [mx.quantize(each, group_size=64, bits=bits) for each in values]
    mx.eval(made)
    return made


@pytest.mark.parametrize("bits", [8, 4])
def test_the_operations_are_those_of_mlx_on_a_cpu(bits: int) -> None:
    given = dict(zip(("words", "scales", "biases"), quantised(bits, 1)[0], strict=True))
    leaves = [Leaf(array, "cache", name, given, name) for name, array in given.items()]

    def run() -> list[Any]:
        with mx.stream(mx.cpu):
            return [mx.dequantize(*given.values(), group_size=64, bits=bits)]

    recorded = record_call(run, leaves)
    own = dequantising_graph([STORED], StoredFormat(bits, 64, "BF16"), "cpu")
    # MLX merges equal operations when it exports a graph, so that they are counted once here.
    assert {(node.name, recorded.arrays[node.outputs[0]].nbytes) for node in recorded.nodes} == {
        (node.name, own.arrays[node.outputs[0]].nbytes) for node in own.nodes
    }
    joined = [
        [len(node.inputs) for node in graph.nodes if node.name == "Concatenate"]
        for graph in (recorded, own)
    ]
    assert joined == [[32 // bits]] * 2


@pytest.mark.parametrize(("bits", "count"), quick([(8, 2), (8, 16), (4, 2), (4, 16)], {(4, 2)}))
@pytest.mark.exhaustive(daily=True)
def test_a_real_evaluation_stays_within_the_bound(bits: int, count: int) -> None:
    stored = quantised(bits, count)
    measured = 0
    for _ in range(10):
        with mx.stream(mx.cpu):
            made = [mx.dequantize(*each, group_size=64, bits=bits) for each in stored]
            mx.eval(mx.ones(1) + 1)  # so that the tasks are at another phase
            before = settled_bytes()
            mx.eval(made)
        measured = max(measured, mx.get_peak_memory() - before)
        del made
    bound = dequantised_peak([STORED] * count, StoredFormat(bits, 64, "BF16"), ANY_CPU)
    assert measured <= bound
    # Each value is an integer of four bytes first, once as a part and once joined.
    assert min(measured, bound) >= (count + 2) * PLAIN_BYTES


def test_a_gpu_makes_only_the_values() -> None:
    assert dequantised_peak([STORED] * 4, StoredFormat(4, 64, "BF16"), ANY_MAC) == 4 * PLAIN_BYTES
    assert dequantised_peak([], StoredFormat(4, 64, "BF16"), ANY_CPU) == 0
