"""What the CUDA backend copies and allocates otherwise than Metal.

Sources: mlx/backend/cuda/{matmul.cpp,rope.cu,sort.cu,scaled_dot_product_attention.cpp and .cu} and
gemms/grouped_gemm_unaligned.cu at 846d176 (0.32.2). Workspaces that cuBLAS and cuDNN choose when
they run are not in it.
"""

from memfit.estimators.base.units import round_up
from memfit.estimators.trace.cpu_rules import matmul
from memfit.estimators.trace.layouts import View, row_strides
from memfit.estimators.trace.metal_rules import sorted_blocks
from memfit.estimators.trace.operation import Operation, copied, fresh, over_or_new

_FLOAT32 = 4
# Up to this many queries attention may take the vector kernel, in two passes above these keys.
_VECTOR_QUERIES = 3
_ONE_PASS_KEYS = 1024
_PARTS = 32
# Arguments of grouped products: a problem's size, three addresses and three strides.
_GROUP_BYTES = 16 + 3 * 8 + 3 * 8
_ALIGNMENT = 256
# Of each thread of a block, which has half as many where values are wider (N_PER_THREAD).
_SORTED_AT_ONCE = 8 * 512


def gather_matmul(op: Operation) -> None:
    """Products with matrices chosen by indices; in order they are grouped, with their arguments."""
    matmul(op)
    groups, right_sorted = op.inputs[1].shape[0], op.arguments[-1:] == (True,)
    if right_sorted and op.inputs[0].shape[-2] == 1:
        op.temporary(round_up(groups * _GROUP_BYTES, _ALIGNMENT), 1)
        op.kernels += 1


def rope(op: Operation) -> None:
    """Rotary embedding: over its input; until 39886de46 (#3704) only where it is in rows."""
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 1
    if source.row or (op.ropes_in_place and len(source.shape) <= 4):
        over_or_new(op, source, out)
    else:
        op.allocate(out)


def attention(op: Operation) -> None:
    """Fused attention by cuDNN, with a result laid out as the queries, or by the vector kernel."""
    query, key, out = *op.inputs[:2], op.outputs[0]
    op.kernels = 1
    for source in op.inputs[:4]:
        if len(source.shape) == 4 and source.strides[-1] != 1:
            copied(op, source)
    if query.shape[2] <= _VECTOR_QUERIES and key.shape[2] > _ONE_PASS_KEYS:
        sums = 2 * _PARTS * (out.size // out.shape[-1])
        op.temporary(_PARTS * out.size + sums, _FLOAT32)
        op.kernels += 1
    if not query.row:
        _lie_as(query, out)
    op.allocate(out)


def _lie_as(query: View, out: View) -> None:
    """Without gaps, the axes in the order of the query's (malloc_with_same_layout)."""
    strides, step = [0] * len(out.shape), 1
    for axis in sorted(range(len(out.shape)), key=lambda axis: query.strides[axis] or 1):
        strides[axis] = step
        step *= out.shape[axis]
    row = tuple(strides) == row_strides(out.shape)
    out.set_layout(tuple(strides), out.size, row=row, column=False, dense=True)


def sort(op: Operation) -> None:
    """A sort; a long axis is sorted in blocks that are merged, the last array is the result."""
    source = op.inputs[0]
    fresh(op)
    length, blocks = sorted_blocks(op, _SORTED_AT_ONCE)
    if blocks <= 1:
        return
    # Values and indices, each read and written in turn, and where the blocks begin.
    for itemsize in (source.itemsize, source.itemsize, 4):
        op.temporary(source.size, itemsize)
    op.temporary(source.size // length * (blocks + 1), 4)
    op.kernels = 1 + 2 * (blocks - 1).bit_length()
