"""What each primitive of MLX does to memory: looks on, writes over an input, copies, allocates.

Every rule is a function of the operation; tables say which primitive follows which. Sources: the
``eval_cpu`` and ``eval_gpu`` of the primitives in mlx/backend/{cpu,metal,common}, read at 0.32.
"""

from collections.abc import Callable, Mapping
from typing import Any

from memfit.estimators.trace import layouts
from memfit.estimators.trace.layouts import Buffer, View
from memfit.estimators.trace.memory import Memory

# A donated buffer may be so much larger than what is written into it (common/utils.h).
_DONATION_SLACK = 16384
_FLOAT32 = 4


class Operation:
    """One primitive being evaluated; rules fill in the outputs' buffers and count its kernels."""

    __slots__ = ("arguments", "inputs", "kernels", "memory", "name", "outputs", "temporaries")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.name = ""
        self.arguments: tuple[Any, ...] = ()
        self.inputs: list[View] = []
        self.outputs: list[View] = []
        self.temporaries: list[Buffer] = []
        self.kernels = 0

    def allocate(self, out: View, nbytes: int | None = None) -> None:
        """Give an output a buffer of its own; it lies as set before."""
        out.buffer = self.memory.allocate(out.nbytes if nbytes is None else nbytes)
        out.buffer.references += 1

    def share(self, out: View, source: View) -> None:
        """Give an output the buffer of an input."""
        out.buffer = source.buffer
        if out.buffer is not None:
            out.buffer.references += 1

    def temporary(self, nbytes: int) -> None:
        """Allocate what lives until the device has run this operation."""
        buffer = self.memory.allocate(nbytes)
        buffer.references += 1
        self.temporaries.append(buffer)


Rule = Callable[[Operation], None]


def is_donatable(source: View, out: View | None = None) -> bool:
    """Whether an operation may write into an input: nobody else holds the array or its buffer."""
    buffer = source.buffer
    if source.references != 1 or buffer is None or buffer.references != 1:
        return False
    return out is None or (
        source.itemsize == out.itemsize and buffer.nbytes <= out.nbytes + _DONATION_SLACK
    )


def _vector(op: Operation, source: View, out: View) -> None:
    """Lie as the input, in its buffer when it can be donated, in a new one otherwise."""
    out.lie_like(source)
    if is_donatable(source, out):
        op.share(out, source)
    else:
        op.allocate(out, source.data_size * out.itemsize)


def _fresh(op: Operation) -> None:
    """Allocate every output."""
    for out in op.outputs:
        op.allocate(out)
    op.kernels = 1


def _nothing(op: Operation) -> None:
    """Allocate every output; the value is written by the host."""
    _fresh(op)
    op.kernels = 0


def _unary(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    if source.dense:
        _vector(op, source, out)
    else:
        op.allocate(out)
    op.kernels = 1


def _binary(op: Operation) -> None:
    for out in op.outputs:
        _binary_output(op, op.inputs[0], op.inputs[1], out)
    op.kernels = 1


def _binary_output(op: Operation, a: View, b: View, out: View) -> None:
    if a.data_size == 1 and b.data_size == 1:
        out.lie_like(a)
        op.allocate(out, out.itemsize)
    elif a.data_size == 1 and b.dense:
        _vector(op, b, out)
    elif b.data_size == 1 and a.dense:
        _vector(op, a, out)
    elif (a.row and b.row) or (a.column and b.column):
        _vector(op, b if is_donatable(b, out) and not is_donatable(a, out) else a, out)
    else:
        _write_over(op, (a, b), out)


def _write_over(op: Operation, sources: tuple[View, ...], out: View) -> None:
    for source in sources:
        if source.row and source.size == out.size and is_donatable(source, out):
            op.share(out, source)
            return
    op.allocate(out)


def _select(op: Operation) -> None:
    a, b, c = op.inputs
    out = op.outputs[0]
    op.kernels = 1
    if a.data_size == b.data_size == c.data_size == 1:
        out.lie_like(b)
        op.allocate(out, out.itemsize)
        return
    rows, columns = a.row and b.row and c.row, a.column and b.column and c.column
    if rows or columns:
        donor = next((x for x in (a, b, c) if is_donatable(x, out)), None)
        out.lie_like(donor or b)
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


def _compiled(op: Operation) -> None:
    """Fused elementwise operations: any input of the right size is written over."""
    arrays = [x for x in op.inputs if x.shape]
    shape = op.outputs[0].shape
    op.kernels = 1
    remaining = list(op.outputs)
    if _runs_flat(arrays, shape):
        like = next((x for x in arrays if x.size == op.outputs[0].size), None)
        for source in arrays:
            if not remaining:
                break
            if source.itemsize == remaining[0].itemsize and is_donatable(source):
                out = remaining.pop(0)
                out.lie_like(source)
                op.share(out, source)
        for out in remaining:
            if like:
                out.lie_like(like)
            op.allocate(out, out.data_size * out.itemsize)
        return
    for source in arrays:
        if not remaining:
            break
        out = remaining[0]
        fits = source.row and source.size == out.size and source.itemsize == out.itemsize
        if fits and is_donatable(source):
            op.share(remaining.pop(0), source)
    for out in remaining:
        op.allocate(out)


def _runs_flat(arrays: list[View], shape: tuple[int, ...]) -> bool:
    if not arrays:
        return not shape
    if any(x.shape != shape for x in arrays):
        return False
    if len(arrays) == 1:
        return arrays[0].dense
    return all(x.row for x in arrays) or all(x.column for x in arrays)


def _look(op: Operation) -> None:
    """Share the first input's buffer, lying as it does."""
    for source, out in zip(op.inputs, op.outputs, strict=False):
        out.lie_like(source)
        op.share(out, source)


def _look_last(op: Operation) -> None:
    for source, out in zip(op.inputs[-len(op.outputs) :], op.outputs, strict=True):
        out.lie_like(source)
        op.share(out, source)


def _broadcast(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    layouts.broadcast(source, out)
    op.share(out, source)


def _transpose(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    layouts.transpose(source, out, op.arguments[0])
    op.share(out, source)


def _slice(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    if not out.size:
        op.allocate(out)
        return
    layouts.cut(source, out, op.arguments[2])
    op.share(out, source)


def _split(op: Operation) -> None:
    for out in op.outputs:
        layouts.split(op.inputs[0], out)
        op.share(out, op.inputs[0])


def _expand(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    strides = list(source.strides)
    for axis in op.arguments[0]:
        strides.insert(axis, 1)
    layouts.same_axes(source, out, tuple(strides))
    op.share(out, source)


def _squeeze(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    dropped = set(op.arguments[0])
    strides = tuple(s for axis, s in enumerate(source.strides) if axis not in dropped)
    layouts.same_axes(source, out, strides)
    op.share(out, source)


def _as_strided(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    strides = tuple(op.arguments[1])
    reach = sum(abs(s) * (n - 1) for s, n in zip(strides, out.shape, strict=True)) + 1
    elements, row, column = layouts.contiguity(out.shape, strides)
    out.lie(strides, reach, row=row, column=column, dense=elements == reach)
    op.share(out, source)


def _reshape(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    if layouts.reshape(source, out):
        op.share(out, source)
    else:
        op.allocate(out)
        op.kernels = 1


def _reinterpret(op: Operation) -> None:
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


def _astype(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    if source.dense:
        _vector(op, source, out)
    else:
        op.allocate(out)
    op.kernels = 1


def _full(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    if source.data_size != 1 and source.dense:
        _vector(op, source, out)
    else:
        op.allocate(out)
    op.kernels = 1


def _concatenate(op: Operation) -> None:
    op.allocate(op.outputs[0])
    op.kernels = len(op.inputs)


def _pad(op: Operation) -> None:
    op.allocate(op.outputs[0])
    op.kernels = 2


def _contiguous(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    assert source.buffer is not None
    small = source.buffer.nbytes <= out.nbytes + _DONATION_SLACK
    if small and (source.row or (source.column and op.arguments[:1] == (True,))):
        out.lie_like(source)
        op.share(out, source)
    else:
        op.allocate(out)
        op.kernels = 1


def _copy_then_write(op: Operation, *, vector: bool) -> None:
    """Copy the first input unless it can be written over, then write the update."""
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 2
    if vector and source.data_size != 1:
        _vector(op, source, out)
        if out.buffer is source.buffer:
            op.kernels = 1
    else:
        op.allocate(out)


def _slice_update(op: Operation) -> None:
    source = op.inputs[0]
    if not op.inputs[1].size:
        op.outputs[0].lie_like(source)
        op.share(op.outputs[0], source)
        return
    _copy_then_write(op, vector=source.dense and source.size == source.data_size)


def _scatter(op: Operation) -> None:
    _copy_then_write(op, vector=op.inputs[0].row)


def _dynamic_slice(op: Operation) -> None:
    op.allocate(op.outputs[0])
    op.temporary(8)
    op.kernels = 2


def _dynamic_slice_update(op: Operation) -> None:
    source = op.inputs[0]
    _copy_then_write(op, vector=source.dense and source.size == source.data_size)
    op.temporary(8)
    op.kernels += 1


def _sort(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 2
    if source.dense:
        _vector(op, source, out)
        op.kernels -= out.buffer is source.buffer
    else:
        op.allocate(out)


def _softmax(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 1
    if source.dense and source.strides[-1] == 1:
        out.lie_like(source)
        if is_donatable(source):
            op.share(out, source)
        else:
            op.allocate(out, source.data_size * source.itemsize)
    else:
        op.allocate(out)
        op.kernels = 2


def _log_sum_exp(op: Operation) -> None:
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 1
    if not (source.dense and source.strides[-1] == 1):
        _copied(op, source)
    op.allocate(out)


def _copied(op: Operation, source: View, itemsize: int | None = None) -> None:
    """Copy an input for the length of the operation."""
    op.temporary(source.size * (itemsize or source.itemsize))
    op.kernels += 1


def _scan(op: Operation) -> None:
    op.kernels = 1
    if not op.inputs[0].row:
        _copied(op, op.inputs[0])
    op.allocate(op.outputs[0])


def _is_matrix(source: View) -> bool:
    """Whether the last two axes lie as rows or as columns without gaps."""
    stride, last = source.strides[-2:]
    rows, columns = source.shape[-2:]
    return (stride == columns and last == 1) or (stride == 1 and last == rows)


def _is_rows(source: View) -> bool:
    return source.strides[-2:] == (source.shape[-1], 1)


def _matmul(op: Operation) -> None:
    op.allocate(op.outputs[0])
    op.kernels = 1
    for source in op.inputs[:2]:
        if not _is_matrix(source):
            _copied(op, source)


def _add_matmul(op: Operation) -> None:
    source, out = op.inputs[2], op.outputs[0]
    op.kernels = 2
    if source.data_size != 1 and source.row:
        _vector(op, source, out)
    else:
        op.allocate(out)
    for factor in op.inputs[:2]:
        if not _is_matrix(factor):
            _copied(op, factor)


def _quantized_matmul(op: Operation) -> None:
    op.kernels = 1
    for source in op.inputs:
        if not source.row:
            _copied(op, source)
    op.allocate(op.outputs[0])


def _gather_quantized_matmul(op: Operation) -> None:
    op.kernels = 1
    # The last two inputs are the indices.
    for source in op.inputs[:-2]:
        if not _is_rows(source):
            _copied(op, source)
    op.allocate(op.outputs[0])


def _quantize(op: Operation) -> None:
    op.kernels = 1
    if not op.inputs[0].row:
        _copied(op, op.inputs[0])
    for out in op.outputs:
        op.allocate(out)


def _convolution_cpu(op: Operation) -> None:
    """A convolution along one axis as MLX's CPU backend multiplies it out, in float32."""
    source, weight = op.inputs[:2]
    out = op.outputs[0]
    op.allocate(out)
    op.kernels = 1
    if len(source.shape) != 3:
        return
    batch, length, channels = source.shape
    _, taps, group_channels = weight.shape
    padding = sum(sum(p) for p in op.arguments[1:3] if isinstance(p, tuple))
    op.temporary(_FLOAT32)
    op.temporary(batch * (length + padding) * channels * _FLOAT32)
    op.temporary(batch * out.shape[1] * channels * taps * _FLOAT32)
    op.kernels += 3
    if channels != group_channels or weight.itemsize != _FLOAT32 or not weight.row:
        _copied(op, weight, _FLOAT32)
    if out.itemsize != _FLOAT32:
        op.temporary(out.size * _FLOAT32)
        op.kernels += 1


def _names(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_SHARED: Mapping[str, Rule] = {
    **_names(_broadcast, "Broadcast BroadcastAxes"),
    **_names(_look, "Copy StopGradient Depends"),
    **_names(_look_last, "CustomTransforms"),
    **_names(_transpose, "Transpose"),
    **_names(_slice, "Slice"),
    **_names(_split, "Split"),
    **_names(_expand, "ExpandDims"),
    **_names(_squeeze, "Squeeze"),
    **_names(_as_strided, "AsStrided"),
    **_names(_reshape, "Reshape Flatten Unflatten"),
    **_names(_reinterpret, "View"),
    **_names(
        _unary,
        "Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh BitwiseInvert Ceil Conjugate Cos Cosh"
        " Erf ErfInv Exp Expm1 Floor Imag Log Log1p LogicalNot Negative Real Round Sigmoid Sign"
        " Sin Sinh Sqrt Square Tan Tanh",
    ),
    **_names(
        _binary,
        "Add ArcTan2 BitwiseBinary Divide DivMod Equal Greater GreaterEqual Less LessEqual"
        " LogAddExp LogicalAnd LogicalOr Maximum Minimum Multiply NotEqual Power Remainder"
        " Subtract",
    ),
    **_names(_select, "Select"),
    **_names(_compiled, "Compiled"),
    **_names(_astype, "AsType"),
    **_names(_full, "Full"),
    **_names(_concatenate, "Concatenate"),
    **_names(_pad, "Pad"),
    **_names(_contiguous, "Contiguous"),
    **_names(_slice_update, "SliceUpdate"),
    **_names(_scatter, "Scatter ScatterAxis MaskedScatter"),
    **_names(_dynamic_slice, "DynamicSlice"),
    **_names(_dynamic_slice_update, "DynamicSliceUpdate"),
    **_names(_softmax, "Softmax"),
    **_names(_log_sum_exp, "LogSumExp"),
    **_names(_scan, "Scan"),
    **_names(_quantize, "Quantize"),
    **_names(_quantized_matmul, "QuantizedMatmul"),
    **_names(_nothing, "NumberOfElements"),
    **_names(
        _fresh,
        "Arange ArgPartition ArgReduce ArgSort Gather GatherAxis RandomBits Reduce SearchSorted",
    ),
}

_CPU: Mapping[str, Rule] = {
    **_SHARED,
    **_names(_sort, "Sort Partition"),
    **_names(_matmul, "Matmul GatherMM SegmentedMM"),
    **_names(_add_matmul, "AddMM"),
    **_names(_gather_quantized_matmul, "GatherQMM"),
    **_names(_convolution_cpu, "Convolution"),
}

RULES: Mapping[str, Mapping[str, Rule]] = {"cpu": _CPU}


def rule_of(backend: str, name: str) -> Rule:
    """Return the rule of a primitive; one that is not described allocates its outputs."""
    return RULES[backend].get(name, _fresh)
