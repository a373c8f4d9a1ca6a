"""What operations allocate, share and overwrite, by the rules of MLX's backends."""

import pytest

from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.kernels import SplitProducts, allocated
from memfit.estimators.trace.buffers import rule_of
from memfit.estimators.trace.graph_format import Argument
from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.operation import Operation

KIB = 1024


# Group size, bits, mode, transposed.
_PACKING = (64, 4, 0, True)


def array(memory: Allocator, *shape: int, users: int = 1, itemsize: int = 4) -> View:
    """A new array with a number of remaining users."""
    view = View(shape, itemsize)
    view.buffer = memory.allocate(view.nbytes)
    view.buffer.references = 1
    view.references = users
    return view


def run(
    name: str,
    inputs: list[View],
    out: View,
    backend: Backend = "cpu",
    *arguments: Argument,
    splits: SplitProducts = SplitProducts(2048),  # noqa: B008 - a tuple
) -> Operation:
    """Apply the rule of a primitive."""
    op = Operation(Allocator(backend), splits=splits)
    op.name, op.inputs, op.outputs, op.arguments = name, inputs, [out], arguments or ((),)
    rule_of(backend, name)(op)
    return op


@pytest.fixture
def memory() -> Allocator:
    return Allocator("cpu")


def test_an_addition_overwrites_an_input_without_other_users(memory: Allocator) -> None:
    a, b, out = array(memory, 8, 8, users=2), array(memory, 8, 8), View((8, 8), 4)
    run("Add", [a, b], out)
    assert out.buffer is b.buffer


def test_an_addition_of_arrays_with_other_users_allocates(memory: Allocator) -> None:
    a, b, out = array(memory, 8, 8, users=2), array(memory, 8, 8, users=2), View((8, 8), 4)
    op = run("Add", [a, b], out)
    assert out.buffer not in (a.buffer, b.buffer)
    assert op.memory.active == 256


def test_a_buffer_the_device_still_reads_is_not_overwritten(memory: Allocator) -> None:
    a, out = array(memory, 8), View((8,), 4)
    assert a.buffer is not None
    a.buffer.references += 1
    run("Negative", [a], out)
    assert out.buffer is not a.buffer


def test_a_cast_to_another_width_allocates(memory: Allocator) -> None:
    a, out = array(memory, 64), View((64,), 2)
    assert run("AsType", [a], out).memory.active == 128


def test_a_buffer_much_larger_than_the_result_is_not_overwritten(memory: Allocator) -> None:
    large = array(memory, 16 * KIB)
    part, out = View((4,), 4), View((4,), 4)
    part.buffer, part.references = large.buffer, 1
    run("Negative", [part], out)
    assert out.buffer is not large.buffer


def test_a_cache_the_loop_released_is_written_in_place(memory: Allocator) -> None:
    cache, update, out = (
        array(memory, 1, 2, 256, 8),
        array(memory, 1, 2, 4, 8),
        View((1, 2, 256, 8), 4),
    )
    op = run("SliceUpdate", [cache, update], out)
    assert (out.buffer is cache.buffer, op.kernels) == (True, 1)
    held, again = array(memory, 1, 2, 256, 8, users=2), View((1, 2, 256, 8), 4)
    op = run("SliceUpdate", [held, update], again)
    assert (again.buffer is held.buffer, op.kernels) == (False, 2)


def test_only_the_cpu_copies_a_factor_with_gaps_between_rows(memory: Allocator) -> None:
    whole = array(memory, 16, 64)
    part = View((16, 32), 4)
    part.set_layout((64, 1), 16 * 64 - 32, row=False, column=False, dense=False)
    part.buffer, part.references = whole.buffer, 1
    weight = array(memory, 32, 48)
    cpu = run("Matmul", [part, weight], View((16, 48), 4))
    assert [b.nbytes for b in cpu.temporaries] == [16 * 32 * 4]
    metal = run("Matmul", [part, weight], View((16, 48), 4), "metal")
    assert metal.temporaries == []


def test_a_long_sum_with_few_results_is_split_on_metal(memory: Allocator) -> None:
    out = View((1, 64, 64), 2)
    op = run("Matmul", [array(memory, 1, 64, 4096), array(memory, 4096, 64)], out, "metal")
    assert op.kernels == 2
    assert [b.nbytes for b in op.temporaries] == [32 * 64 * 64 * 4]


@pytest.mark.parametrize(
    ("inner", "rows", "parts"), [(1000, 400, 2), (2048, 600, 2), (4096, 512, 2), (9728, 2048, 3)]
)
def test_neural_accelerators_sum_long_products_from_parts(
    memory: Allocator, inner: int, rows: int, parts: int
) -> None:
    # Inner axes above three times the longer side, above twice where that is at most 1024.
    factors = [array(memory, 1, rows, inner), array(memory, inner, 256)]
    out = View((1, rows, 256), 2)
    nax = SplitProducts(2048, nax=True, nax_splits=True)
    op = run("Matmul", factors, out, "metal", splits=nax)
    assert [b.nbytes for b in op.temporaries] == [parts * rows * 256 * 4]
    assert op.kernels == 2
    assert run("Matmul", factors, out, "metal", splits=nax._replace(nax_splits=False)).kernels == 1
    shorter = [array(memory, 1, rows, 2 * rows), array(memory, 2 * rows, 256)]
    assert run("Matmul", shorter, out, "metal", splits=nax).kernels == 1


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "parts"),
    [
        (127, 1536, 256, 12),  # 16 for 512 blocks, but 1536 is 24 groups of 64
        (127, 5120, 48, 40),
        (511, 2560, 512, 2),
        (2047, 2048, 1, 8),
        (2047, 2048, 256, 0),  # 512 blocks without parts
        (5, 2048, 256, 0),  # a vector kernel
    ],
)
def test_few_results_of_packed_weights_are_summed_from_parts(
    memory: Allocator, rows: int, inner: int, columns: int, parts: int
) -> None:
    packed = [array(memory, columns, inner // 8), *[array(memory, columns, inner // 64)] * 2]
    factors = [array(memory, 1, rows, inner, itemsize=2), *packed]
    out = View((1, rows, columns), 2)
    splits = SplitProducts(packed_splits=True)
    op = run("QuantizedMatmul", factors, out, "metal", *_PACKING, splits=splits)
    nbytes = [allocated(parts * rows * columns * 2, "metal")] if parts else []
    assert [b.nbytes for b in op.temporaries] == nbytes
    assert op.kernels == 1 + bool(parts)
    assert run("QuantizedMatmul", factors, out, "metal", *_PACKING).kernels == 1


def test_fused_attention_writes_the_layout_the_projection_reads(memory: Allocator) -> None:
    query = array(memory, 1, 8, 32, 64, itemsize=2)
    keys = array(memory, 1, 2, 32, 64, itemsize=2)
    out = View((1, 8, 32, 64), 2)
    run("ScaledDotProductAttention", [query, keys, keys], out, "metal")
    tokens_first, joined = View((1, 32, 8, 64), 2), View((1, 32, 512), 2)
    run("Transpose", [out], tokens_first, "cpu", (0, 2, 1, 3))
    assert run("Reshape", [tokens_first], joined).kernels == 0


def test_softmax_overwrites_scores_and_a_norm_overwrites_heads(memory: Allocator) -> None:
    scores, out = array(memory, 4, 8, 8), View((4, 8, 8), 4)
    run("Softmax", [scores], out)
    assert out.buffer is scores.buffer
    heads, normed = array(memory, 1, 8, 4, 16), View((1, 8, 4, 16), 4)
    run("RMSNorm", [heads, array(memory, 16, users=2)], normed, "metal")
    assert normed.buffer is heads.buffer


def test_a_kernel_without_a_rule_allocates_its_results() -> None:
    memory = Allocator("metal")
    out = View((4, 4), 4)
    assert run("a_new_kernel", [array(memory, 4, 4)], out, "metal").memory.active == 64


def test_a_freed_buffer_of_similar_size_is_reused_until_the_cache_is_cleared() -> None:
    memory = Allocator("cpu")
    first = memory.allocate(10_000)
    first.references = 1
    memory.release(first)
    assert memory.allocate(9_000).nbytes == 10_000
    memory.clear_cache()
    assert memory.allocate(9_000).nbytes == 9_000
