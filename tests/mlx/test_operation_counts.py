"""The table of kernels and views, compared with recorded graphs of MLX and mlx-lm's classes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the graphs are those of MLX and mlx-lm")

import mlx.core as mx
from msgspec.structs import replace

from memfit.estimators.arch.model import LowRank
from memfit.estimators.arch.registry import build_model
from memfit.estimators.arch.specs import Attention
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx import operation_counts
from memfit.estimators.mlx.kernels import split_products
from memfit.estimators.mlx.kv_cache import KVFormat
from memfit.estimators.mlx.operation_counts import MATMUL, QUANTIZED_MATMUL, OperationCount
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.trace.graph_format import Call, Trace
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for, recorded
from memfit.estimators.trace.leaves import Leaf
from memfit.estimators.trace.peak import peak
from memfit.estimators.trace.recording import record_call
from memfit.estimators.trace.streams import Stream
from memfit.estimators.trace.traced_model import TracedModel
from memfit.estimators.weights.derived import QuantizationPlan
from memfit.estimators.workspace.attention import attend
from memfit.estimators.workspace.call import BackendTraits, CallShape, Occupancy
from memfit.estimators.workspace.layer import record_layer
from memfit.estimators.workspace.prepared import Projection, prepare
from memfit.estimators.workspace.projections import norm, project, rope
from memfit.estimators.workspace.tape import Tape

DEVICES = {
    "metal": Device("M4 Max", "metal", 0, 0, None, "flag", "s", 16),
    "cpu": Device("this host", "cpu", 0, 0, None, "flag"),
}
TOKENS, KEYS = 40, 40
# No fused kernel has heads of this width, so that every backend computes the scores.
HEADS = Attention(heads=4, kv_heads=2, key_dim=48, value_dim=48)
CASES = Path(__file__).parents[1] / "arch" / "cases"


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernels of each operation that a device is given."""
    kernels: list[int] = []
    after = Stream.after

    def counted(self: Stream, op: Any, *given: Any) -> None:
        kernels.append(op.kernels)
        after(self, op, *given)

    monkeypatch.setattr(Stream, "after", counted)
    return kernels


def dispatches(kernels: list[int], backend: str) -> int:
    """Return the work given to a device: the CPU gets one empty task after each operation."""
    return sum(kernels) + (len(kernels) if backend == "cpu" else 0)


def arrays(*shapes: tuple[int, ...]) -> list[Any]:
    return [mx.zeros(shape, mx.bfloat16) for shape in shapes]


def recorded_graph(backend: Backend, function: Callable[..., Any], given: list[Any]) -> Trace:
    """Return the graph of a function of MLX as a call of a model."""
    places: dict[int, Any] = {}
    leaves = [Leaf(array, "tokens", "", places, index) for index, array in enumerate(given)]
    core = library_for(backend).core

    def run() -> list[Any]:
        with recorded(TraceTarget(backend=backend)):
            return [function(core, *(places[index] for index in range(len(given))))]

    graph = record_call(run, leaves)
    call = Call("first_chunk", 1, 0, graph.arrays, graph.nodes, graph.outputs, graph.outputs)
    return Trace("none", backend, {}, {}, (call,))


def shape(backend: Backend, tokens: int) -> CallShape:
    return CallShape(tokens, 1, 2, BackendTraits(backend, MlxVersions(), nax=False), {}, 0)


def attended(tape: Tape, tokens: int, *, array_mask: bool = False) -> None:
    given = tuple(tape.existing(n) for n in (tokens * 192, KEYS * 96, KEYS * 96))
    occupancy = Occupancy(KEYS, KEYS, KEYS, KVFormat(2))
    attend(
        tape,
        shape(tape.backend, tokens),
        (given[0], given[1], given[2]),
        occupancy=occupancy,
        spec=HEADS,
        array_mask=array_mask,
    )


def heads_of(core: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    made = core.fast.scaled_dot_product_attention(
        q.transpose(0, 2, 1, 3), k, v, scale=0.1, mask=mask
    )
    return made.transpose(0, 2, 1, 3).reshape(1, q.shape[1], -1)


KEYS_AND_VALUES = ((1, 2, KEYS, 48), (1, 2, KEYS, 48))
QUERIES = (1, TOKENS, 4, 48)
MATRIX = Projection("proj", 64, 96, 6144, MATMUL, packing=None, low_rank=None)
PACKING = Quantization(4, 32)
PACKED = Projection("proj", 64, 96, 960, QUANTIZED_MATMUL, packing=PACKING, low_rank=None)


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], Callable[[Tape], Any]]] = {
    "norm": (
        lambda core, x, w: core.fast.rms_norm(x, w, 1e-5),
        [(1, TOKENS, 64), (64,)],
        lambda tape: norm(tape, 0, TOKENS * 64, shared=True),
    ),
    "rope": (
        lambda core, x: core.fast.rope(
            x.transpose(0, 2, 1, 3), 32, traditional=False, base=1e4, scale=1.0, offset=4
        ),
        [(1, TOKENS, 4, 32)],
        lambda tape: rope(tape, 0, TOKENS * 128, rows=TOKENS, dim=32),
    ),
    "projection": (
        lambda _, x, w: x @ w.T,
        [(1, TOKENS, 64), (96, 64)],
        lambda tape: project(tape, 0, MATRIX, TOKENS),
    ),
    "attention over a chunk": (
        lambda core, q, k, v: heads_of(core, q, k, v, "causal"),
        [QUERIES, *KEYS_AND_VALUES],
        lambda tape: attended(tape, TOKENS),
    ),
    "attention with a mask": (
        heads_of,
        [QUERIES, *KEYS_AND_VALUES, (TOKENS, KEYS)],
        lambda tape: attended(tape, TOKENS, array_mask=True),
    ),
    "attention of one token": (
        lambda core, q, k, v: heads_of(core, q, k, v, None),
        [(1, 1, 4, 48), *KEYS_AND_VALUES],
        lambda tape: attended(tape, 1),
    ),
}


@pytest.mark.parametrize("backend", ["metal", "cpu"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_mlx_has_the_counts_of_its_rows(
    name: str, backend: Backend, operations: list[int]
) -> None:
    function, shapes, followed = FUNCTIONS[name]
    peak(recorded_graph(backend, function, arrays(*shapes)), DEVICES[backend])
    tape = Tape(backend, 2, TOKENS * 64)
    followed(tape)
    by_rows = sum(step.dispatches for step in tape.program().steps)
    by_trace = dispatches(operations, backend)
    if backend == "metal":
        assert by_rows == by_trace
    else:
        assert abs(by_rows - by_trace) * 3 <= by_trace


@pytest.mark.parametrize("backend", ["metal", "cpu"])
def test_a_packed_projection_has_the_kernels_of_its_row(
    backend: Backend, operations: list[int]
) -> None:
    given = arrays((1, TOKENS, 64), (96, 2), (96, 2))
    words = mx.zeros((96, 8), mx.uint32)
    trace = recorded_graph(
        backend,
        lambda core, x, s, b, w: core.quantized_matmul(x, w, s, b, group_size=32, bits=4),
        [*given, words],
    )
    peak(trace, DEVICES[backend])
    tape = Tape(backend, 2, TOKENS * 64, split_products(DEVICES[backend], MlxVersions()))
    project(tape, 0, PACKED, TOKENS)
    assert dispatches(operations, backend) == sum(s.dispatches for s in tape.program().steps)


def dora(core: Any, x: Any, scales: Any, biases: Any, a: Any, b: Any, m: Any, words: Any) -> Any:
    """mlx-lm tuner/dora.py, DoRALinear, over a packed matrix."""
    matrix = core.dequantize(words, scales, biases, group_size=32, bits=4)
    y, z = x @ matrix.T, (x @ a) @ b
    out = y + (20.0 * z).astype(x.dtype)
    norms = core.linalg.norm(matrix + (20.0 * b.T) @ a.T, axis=1)
    return (m / norms).astype(x.dtype) * out


@pytest.mark.parametrize("backend", ["metal", "cpu"])
def test_dora_over_a_packed_matrix_has_the_counts_of_its_rows(
    backend: Backend, operations: list[int]
) -> None:
    given = [
        *arrays((1, TOKENS, 64), (96, 2), (96, 2)),
        *(mx.zeros(shape, mx.float32) for shape in ((64, 8), (8, 96), (96,))),
        mx.zeros((96, 8), mx.uint32),
    ]
    peak(recorded_graph(backend, dora, given), DEVICES[backend])
    tape = Tape(backend, 2, TOKENS * 64)
    project(tape, 0, replace(PACKED, low_rank=LowRank(8, 4, rescales=True)), TOKENS)
    assert dispatches(operations, backend) == sum(s.dispatches for s in tape.program().steps)


# Without biases, which the formula does not cover, and with layers of one kind.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen3": {},
    "gemma2": {},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
# The rows of latent attention and of recurrences leave out operations that hold little memory:
# fewer kernels than recorded, at least 60 % of them. A loop over tokens has no fixed number.
FEWER: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "minicpm3": {},
    "kimi_linear": {},
    "mamba2": {},
    "falcon_h1": {},
    "jamba": {},
    "lfm2": {},
}
# Packed: Metal computes small plain products in parts, with more kernels than large ones.


def layer_kernels(config: dict[str, Any], operations: list[int]) -> int:
    """Return the kernels of one more layer in a chunk, as mlx-lm's class makes them on Metal."""
    counted = []
    for layers in (2, 3):
        model = TracedModel({**config, "num_hidden_layers": layers}, "metal", quantize=PACKING)
        trace, _ = model.record(Workload(prompt_tokens=TOKENS), TraceTarget(backend="metal"))
        operations.clear()
        peak(Trace(trace.model_type, "metal", {}, {}, trace.calls[:1]), DEVICES["metal"])
        counted.append(sum(operations))
    return counted[1] - counted[0]


def kernels_by_rows(config: dict[str, Any]) -> int:
    """Return the kernels of the last layer in a chunk by the table."""
    model = build_model(config, "config.json")
    plan = QuantizationPlan(PACKING, converting=True)
    prepared = prepare(model, DEVICES["metal"], versions=MlxVersions(), packing=plan)
    buffers = {b: Occupancy(0, 256, TOKENS - 1, KVFormat(2)) for b in model.kv_buffers()}
    call = CallShape(TOKENS - 1, 1, 2, prepared.traits, buffers, 0)
    last = prepared.order[-1]
    layer = record_layer(prepared.plans[last], call, model.hidden_size, prepared.buffers[last])
    program = layer.program()
    return sum(step.dispatches for step in (*program.steps, *program.deferred))


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_of_a_model_has_the_kernels_of_its_rows(name: str, operations: list[int]) -> None:
    config = json.loads((CASES / f"{name}.json").read_text()) | MODELS[name]
    by_trace = layer_kernels(config, operations)
    assert abs(kernels_by_rows(config) - by_trace) * 10 <= by_trace


@pytest.mark.parametrize("name", FEWER)
def test_rows_of_latent_attention_and_recurrences_have_no_more_kernels(
    name: str, operations: list[int]
) -> None:
    config = json.loads((CASES / f"{name}.json").read_text()) | FEWER[name]
    by_trace = layer_kernels(config, operations)
    assert by_trace * 60 <= kernels_by_rows(config) * 100 <= by_trace * 110


def test_every_row_names_its_source() -> None:
    rows = [row for row in vars(operation_counts).values() if isinstance(row, OperationCount)]
    assert len(rows) > 40
    assert all(
        row.source.startswith(("mlx/", "mlx-lm models/", "mlx-lm tuner/", "written by"))
        for row in rows
    )
    assert all(row.kernels >= 0 <= row.views for row in rows)
