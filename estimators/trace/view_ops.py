"""Views: operations that read a buffer in another way, and copy only when they cannot.

Sources: mlx/backend/common/{common,slicing,broadcasting}.cpp, backend/cpu/primitives.cpp,
backend/gpu/primitives.cpp.
"""

from memfit.estimators.trace import layouts
from memfit.estimators.trace.operation import DONATION_SLACK, Operation


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
        op.allocate(out)
        op.kernels = 1


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
        op.allocate(out)
        op.kernels = 1


def contiguous(op: Operation) -> None:
    """cpu/primitives.cpp, Contiguous: shares unless it would hold a much larger buffer alive."""
    source, out = op.inputs[0], op.outputs[0]
    assert source.buffer is not None
    small = source.buffer.nbytes <= out.nbytes + DONATION_SLACK
    if small and (source.row or (source.column and op.arguments[:1] == (True,))):
        out.copy_layout(source)
        op.share(out, source)
    else:
        op.allocate(out)
        op.kernels = 1
