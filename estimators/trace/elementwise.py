"""Operations on each element: they write over an input where MLX may.

Sources: mlx/backend/common/{unary,binary,ternary,copy}.h, common/compiled.cpp, */softmax.cpp.
"""

from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.operation import Operation, is_donatable, over_or_new, vector


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
        vector(op, b if is_donatable(b, out) and not is_donatable(a, out) else a, out)
    else:
        _write_over(op, (a, b), out)


def _write_over(op: Operation, sources: tuple[View, ...], out: View) -> None:
    for source in sources:
        # An operand that is broadcast is too small to be written over.
        if source.row and source.size == out.size and is_donatable(source, out):
            op.share(out, source)
            return
    op.allocate(out)


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
        donor = next((x for x in (a, b, c) if is_donatable(x, out)), None)
        out.copy_layout(donor or b)
        if donor:
            op.share(out, donor)
        else:
            op.allocate(out, b.data_size * out.itemsize)
        return
    _write_over_any(op, (a, b, c), out)


def _write_over_any(op: Operation, sources: tuple[View, ...], out: View) -> None:
    donor = next((x for x in sources if x.row and is_donatable(x, out)), None)
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
        if left and _can_become(source, left[0], is_flat=is_flat):
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


def _can_become(source: View, out: View, *, is_flat: bool) -> bool:
    fits = is_flat or (source.row and source.size == out.size)
    return fits and source.itemsize == out.itemsize and is_donatable(source)


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
