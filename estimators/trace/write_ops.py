"""Operations that put arrays into a larger one.

Sources: mlx/backend/cpu/{primitives,indexing}.cpp, backend/metal/{indexing,slicing}.cpp.
"""

from memfit.estimators.trace.operation import Operation, fresh, vector


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
