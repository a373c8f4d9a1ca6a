"""What the CPU backend copies and allocates for products, sorts and convolutions.

Sources: mlx/backend/cpu/{matmul,quantized,sort,scan,logsumexp,conv,masked_mm}.cpp.
"""

from math import prod

from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.operation import Operation, copied, fresh, over_any_or_new, vector

_FLOAT32 = 4


def log_sum_exp(op: Operation) -> None:
    """logsumexp.cpp: rows without gaps, or a copy."""
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 1
    if not (source.dense and source.strides[-1] == 1):
        copied(op, source)
    op.allocate(out)


def scan(op: Operation) -> None:
    """scan.cpp: over a copy where the input has gaps."""
    op.kernels = 1
    if not op.inputs[0].row:
        copied(op, op.inputs[0])
    op.allocate(op.outputs[0])


def sort(op: Operation) -> None:
    """sort.cpp: copied into the output, which is sorted in place."""
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 2
    if source.dense:
        vector(op, source, out)
        # Over its own input there is nothing to copy.
        op.kernels -= out.buffer is source.buffer
    else:
        op.allocate(out)


def _is_matrix(source: View) -> bool:
    """Whether the last two axes are rows or columns without gaps."""
    stride, last = source.strides[-2:]
    rows, columns = source.shape[-2:]
    return (stride == columns and last == 1) or (stride == 1 and last == rows)


def is_rows(source: View) -> bool:
    return source.strides[-2:] == (source.shape[-1], 1)


def matmul(op: Operation) -> None:
    """matmul.cpp, check_transpose: an operand that is neither rows nor columns is copied.

    So does cuBLAS (backend/cuda/matmul.cpp).
    """
    op.allocate(op.outputs[0])
    op.kernels = 1
    # A transposed matrix is read as it is: the product has a flag for it.
    for source in op.inputs[:2]:
        if not _is_matrix(source):
            copied(op, source)


def add_matmul(op: Operation) -> None:
    """matmul.cpp, AddMM: the summand is copied into the output, the product added to it."""
    source, out = op.inputs[2], op.outputs[0]
    op.kernels = 2
    # A bias is broadcast over the rows, so it is copied into a new array.
    if source.data_size != 1 and source.row:
        vector(op, source, out)
    else:
        op.allocate(out)
    for factor in op.inputs[:2]:
        if not _is_matrix(factor):
            copied(op, factor)


def quantized_matmul(op: Operation) -> None:
    """quantized.cpp, ensure_row_contiguous: before the output, unlike on Metal."""
    op.kernels = 1
    for source in op.inputs:
        if not source.row:
            copied(op, source)
    op.allocate(op.outputs[0])


def gather_quantized_matmul(op: Operation) -> None:
    op.kernels = 1
    # The last two inputs are the indices.
    # The rows of one expert must have no gaps; the experts may lie apart.
    for source in op.inputs[:-2]:
        if not is_rows(source):
            copied(op, source)
    op.allocate(op.outputs[0])


def quantize(op: Operation) -> None:
    op.kernels = 1
    if not op.inputs[0].row:
        copied(op, op.inputs[0])
    # Words, scales and, in affine mode, biases.
    for out in op.outputs:
        op.allocate(out)


def convolution(op: Operation) -> None:
    """A convolution as MLX's CPU backend multiplies it out, in float32.

    Source: conv.cpp, explicit_gemm_conv_1D_cpu and explicit_gemm_conv_ND_cpu. Others have a loop
    that needs no buffer: with groups along several axes, or dilated.
    """
    source, weight = op.inputs[:2]
    out = op.outputs[0]
    fresh(op)
    batch, *lengths, channels = source.shape
    taps, group_channels = weight.shape[1:-1], weight.shape[-1]
    _, before, after, dilation, input_dilation = op.arguments[:5]
    is_grouped = channels != group_channels
    if set(input_dilation) != {1} or set(dilation) != {1} or (is_grouped and len(lengths) > 1):
        return
    # A zero, the padded input, and the windows written out as rows.
    padded = (sum(sides) for sides in zip(lengths, before, after, strict=True))
    op.temporary(1, _FLOAT32)
    op.temporary(batch * prod(padded) * channels, _FLOAT32)
    op.temporary(batch * prod(out.shape[1:-1]) * channels * prod(taps), _FLOAT32)
    op.kernels += 3
    # A grouped weight is transposed, so it is copied whatever its type.
    if is_grouped or weight.itemsize != _FLOAT32 or not weight.row:
        copied(op, weight, _FLOAT32)
    # The product is float32 and is cast into the output.
    if out.itemsize != _FLOAT32:
        op.temporary(out.size, _FLOAT32)
        op.kernels += 1


def all_reduce(op: Operation) -> None:
    """A sum over all ranks, in the buffer of its input where no other holds it.

    Source of the collectives: mlx backend/cpu/distributed.cpp.
    """
    over_any_or_new(op, op.inputs, op.outputs[0])
    op.kernels = 1


def all_gather(op: Operation) -> None:
    """The arrays of all ranks one after another."""
    op.allocate(op.outputs[0])
    _send_rows(op)


def send(op: Operation) -> None:
    """Give an array to another rank, and return it."""
    op.outputs[0].copy_layout(op.inputs[0])
    op.share(op.outputs[0], op.inputs[0])
    _send_rows(op)


def receive(op: Operation) -> None:
    """Take an array of another rank."""
    op.allocate(op.outputs[0])
    op.kernels = 1


def _send_rows(op: Operation) -> None:
    op.kernels = 1
    if not op.inputs[0].row:
        copied(op, op.inputs[0])
