"""Rules of all backends: views, operations on each element, and writes into larger arrays.

Sources: mlx/backend/common/{common,slicing,broadcasting,compiled}.cpp and {unary,binary,ternary,
copy}.h, backend/cpu/{primitives,indexing}.cpp, backend/gpu/{primitives,slicing}.cpp,
backend/metal/{indexing,slicing}.cpp, */softmax.cpp.
"""

from memfit.estimators.trace import layouts
from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.operation import (
    Operation,
    fresh,
    over_or_new,
    vector,
)


# A view has no kernel: it shares the buffer under other strides, and nothing is encoded.
def look(op: Operation) -> None:
    """Share the first input's buffer, lying as it does."""
    for source, out in zip(op.inputs, op.outputs, strict=False):
        out.copy_layout(source)
        op.share(out, source)


def look_last(op: Operation) -> None:
    for source, out in zip(op.inputs[-len(op.outputs) :], op.outputs, strict=True):
        out.copy_layout(source)
        op.share(out, source)


def broadcast(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    layouts.broadcast(source, out)
    op.share(out, source)


def transpose(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    layouts.transpose(source, out, op.arguments[0])
    op.share(out, source)


def cut(op: Operation) -> None:
    """common/slicing.cpp, slice: no view of nothing."""
    source, out = op.inputs[0], op.outputs[0]
    if not out.size:
        op.allocate(out)
        return
    # The arguments of Slice are start, stop and steps.
    layouts.cut(source, out, op.arguments[2])
    op.share(out, source)


def split(op: Operation) -> None:
    # One buffer for all parts: it is free when the last part is.
    for out in op.outputs:
        layouts.split(op.inputs[0], out)
        op.share(out, op.inputs[0])


def expand(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    strides = list(source.strides)
    for axis in op.arguments[0]:
        # An axis of length 1 may have any stride; common/common.cpp gives it 1.
        strides.insert(axis, 1)
    layouts.same_axes(source, out, tuple(strides))
    op.share(out, source)


def squeeze(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    dropped = set(op.arguments[0])
    strides = tuple(s for axis, s in enumerate(source.strides) if axis not in dropped)
    layouts.same_axes(source, out, strides)
    op.share(out, source)


def as_strided(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    layouts.as_strided(out, tuple(op.arguments[1]))
    op.share(out, source)


def reshape(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    if layouts.reshape(source, out):
        op.share(out, source)
    else:
        fresh(op)


def reinterpret(op: Operation) -> None:
    """common/primitives, View: bytes as another type, where the last axis has no gaps."""
    source, out = op.inputs[0], op.outputs[0]
    small = out.itemsize < source.itemsize and source.strides[-1:] == (1,)
    if source.itemsize == out.itemsize or small or source.row:
        before, after = source.itemsize, out.itemsize
        strides = tuple(s * before // after for s in source.strides[:-1]) + source.strides[-1:]
        layouts.same_axes(source, out, strides)
        out.data_size = source.data_size * before // after
        op.share(out, source)
    else:
        fresh(op)


def contiguous(op: Operation) -> None:
    """cpu/primitives.cpp, Contiguous: shares unless it would hold a much larger buffer alive."""
    source, out = op.inputs[0], op.outputs[0]
    lies_so = source.row or (source.column and op.arguments[:1] == (True,))
    if lies_so and op.is_near(source, out):
        out.copy_layout(source)
        op.share(out, source)
    else:
        fresh(op)


def unary(op: Operation) -> None:
    """Source: common/unary.h, set_unary_output_data."""
    source, out = op.inputs[0], op.outputs[0]
    if source.dense:
        vector(op, source, out)
    else:
        op.allocate(out)
    op.kernels = 1


def binary(op: Operation) -> None:
    """Source: common/binary.h, set_binary_op_output_data."""
    for out in op.outputs:
        _binary_output(op, op.inputs[0], op.inputs[1], out)
    op.kernels = 1


def _binary_output(op: Operation, a: View, b: View, out: View) -> None:
    # The cases of get_binary_op_type: scalar and scalar, scalar and vector, vectors, general.
    if a.data_size == 1 and b.data_size == 1:
        out.copy_layout(a)
        op.allocate(out, out.itemsize)
    # Vector with scalar: the output has the layout of the vector.
    elif a.data_size == 1 and b.dense:
        vector(op, b, out)
    elif b.data_size == 1 and a.dense:
        vector(op, a, out)
    elif (a.row and b.row) or (a.column and b.column):
        # MLX tries to write over the first operand before the second.
        vector(op, b if op.is_donatable(b, out) and not op.is_donatable(a, out) else a, out)
    else:
        # An operand that is broadcast is too small to be written over.
        _write_over(op, tuple(x for x in (a, b) if x.size == out.size), out)


def select(op: Operation) -> None:
    """Source: common/ternary.h, set_ternary_op_output_data."""
    a, b, c = op.inputs
    out = op.outputs[0]
    op.kernels = 1
    if a.data_size == b.data_size == c.data_size == 1:
        out.copy_layout(b)
        op.allocate(out, out.itemsize)
        return
    # All three have one layout, so one loop goes over their elements as they are.
    rows, columns = a.row and b.row and c.row, a.column and b.column and c.column
    if rows or columns:
        donor = next((x for x in (a, b, c) if op.is_donatable(x, out)), None)
        out.copy_layout(donor or b)
        if donor:
            op.share(out, donor)
        else:
            op.allocate(out, b.data_size * out.itemsize)
        return
    _write_over(op, (a, b, c), out)


def _write_over(op: Operation, sources: tuple[View, ...], out: View) -> None:
    donor = next((x for x in sources if x.row and op.is_donatable(x, out)), None)
    if donor:
        op.share(out, donor)
    else:
        op.allocate(out)


def compiled(op: Operation) -> None:
    """Fused elementwise operations: any input of the right size is written over.

    Source: common/compiled.cpp, compiled_allocate_outputs.
    """
    # A scalar is never written over.
    arrays = [x for x in op.inputs if x.shape]
    first = op.outputs[0]
    op.kernels = 1
    is_flat = _runs_flat(arrays, first.shape)
    left = list(op.outputs)
    # Each input can become one output, in the order of both.
    for source in [] if op.compiled_copies else arrays:
        if left and _can_become(op, source, left[0], is_flat=is_flat):
            out = left.pop(0)
            if is_flat:
                out.copy_layout(source)
            op.share(out, source)
    # New outputs have the layout of the first input of their size.
    like = next((x for x in arrays if x.size == first.size), None)
    for out in left:
        if is_flat and like:
            out.copy_layout(like)
        op.allocate(out, out.data_size * out.itemsize)


def _can_become(op: Operation, source: View, out: View, *, is_flat: bool) -> bool:
    fits = is_flat or (source.row and source.size == out.size)
    return fits and source.itemsize == out.itemsize and op.is_donatable(source)


def _runs_flat(arrays: list[View], shape: tuple[int, ...]) -> bool:
    """Whether the kernel reads elements in their order (compiled_check_contiguity)."""
    if not arrays:
        return not shape
    if any(x.shape != shape for x in arrays):
        return False
    if len(arrays) == 1:
        return arrays[0].dense
    return all(x.row for x in arrays) or all(x.column for x in arrays)


def full(op: Operation) -> None:
    """A value in every element; from an array of one it is a copy (common/copy.h)."""
    source, out = op.inputs[0], op.outputs[0]
    if source.data_size != 1 and source.dense:
        vector(op, source, out)
    else:
        op.allocate(out)
    op.kernels = 1


def softmax(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 1
    # */softmax.cpp, set_output: rows without gaps are computed where they are, others copied.
    if source.dense and source.strides[-1] == 1:
        over_or_new(op, source, out)
    else:
        op.allocate(out)
        op.kernels = 2


def nothing(op: Operation) -> None:
    """Allocate every output; the value is written by the host."""
    fresh(op)
    op.kernels = 0


def concatenate(op: Operation) -> None:
    """One copy for each input (gpu/slicing.cpp, concatenate_gpu)."""
    op.allocate(op.outputs[0])
    # Each input is copied to its place in the output.
    op.kernels = len(op.inputs)


def pad(op: Operation) -> None:
    """The value everywhere, then the input (gpu/slicing.cpp, pad_gpu)."""
    op.allocate(op.outputs[0])
    op.kernels = 2


def _copy_then_write(op: Operation, *, as_it_lies: bool) -> None:
    """Copy the first input unless it can be written over, then write the update."""
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 2
    if as_it_lies and source.data_size != 1:
        # A cache that nothing else holds is written where it is; one that is shared is copied.
        vector(op, source, out)
        if out.buffer is source.buffer:
            op.kernels = 1
    else:
        op.allocate(out)


def slice_update(op: Operation) -> None:
    source = op.inputs[0]
    # Nothing to write: the output is the source.
    if not op.inputs[1].size:
        op.outputs[0].copy_layout(source)
        op.share(op.outputs[0], source)
        return
    _copy_then_write(op, as_it_lies=source.dense and source.size == source.data_size)


def scatter(op: Operation) -> None:
    _copy_then_write(op, as_it_lies=op.inputs[0].row)


def dynamic_slice(op: Operation) -> None:
    """The start is computed on the device, an int64 (gpu/primitives, compute_dynamic_offset)."""
    op.allocate(op.outputs[0])
    op.temporary(1, 8)
    op.kernels = 2


def dynamic_slice_update(op: Operation) -> None:
    source = op.inputs[0]
    _copy_then_write(op, as_it_lies=source.dense and source.size == source.data_size)
    op.temporary(1, 8)
    op.kernels += 1
