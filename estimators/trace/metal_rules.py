"""What the Metal backend copies and allocates for products, attention, norms and sorts.

Sources: mlx/backend/metal/{matmul,quantized,normalization,rope,scaled_dot_product_attention,sort,
scan,conv,custom_kernel}.cpp.
"""

from memfit.estimators.base.units import ceil_div
from memfit.estimators.mlx.kernels import (
    PART_ITEM_BYTES,
    SECOND_PASS_KERNELS,
    VECTOR_QUERIES,
    VectorCall,
)
from memfit.estimators.trace.cpu_rules import is_rows
from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.operation import (
    Operation,
    copied,
    fresh,
    over_any_or_new,
    over_or_new,
    vector,
)

_FLOAT32 = 4
# For each block: queries copied, a product, a softmax, a product, the result copied
# (sdpa_full_self_attention_blocked in libmlx.dylib of mlx-metal 0.32.4).
_BLOCK_KERNELS = 5
_SORTED_AT_ONCE = 2048


def normalisation(op: Operation) -> None:
    """RMSNorm and LayerNorm write over an input if its rows follow one another."""
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 1
    strides, shape = source.strides, source.shape
    # normalization.cpp, set_output: any other input is copied first.
    regular = source.dense and strides[-1] == 1
    if regular and len(shape) > 1:
        regular = strides[-2] in (0, shape[-1]) or shape[-2] == 1
    if not regular:
        op.allocate(out)
        op.kernels = 2
        return
    over_or_new(op, source, out)


def norm_gradient(op: Operation) -> None:
    """RMSNormVJP and LayerNormVJP: over an input or the cotangent, and a sum of each row's part.

    Source: normalization.cpp; since MLX's 6c0f02a75 RMSNormVJP adds up most of the sum at once.
    """
    source, cotangent = op.inputs[0], op.inputs[-1]
    out, *sums = op.outputs
    op.kernels = 1 + len(sums)
    for array in (source, cotangent):
        if not array.row:
            copied(op, array)
    over_any_or_new(op, (source, cotangent), out)
    if sums:
        op.temporary(out.size, out.itemsize)
    for each in sums:
        op.allocate(each)


def rope(op: Operation) -> None:
    """Rotary embedding: over its input when rows follow one another, else in a new array."""
    over_any_or_new(op, op.inputs[:1], op.outputs[0])
    op.kernels = 1


def attention(op: Operation) -> None:
    """Fused attention; the result of many queries has the layout that the projection reads."""
    query, out = op.inputs[0], op.outputs[0]
    op.kernels = 1
    # What a block of queries needs, where the kernel takes them in blocks.
    for scratch in op.outputs[1:]:
        op.allocate(scratch)
        op.kernels = _BLOCK_KERNELS * ceil_div(query.shape[2], scratch.shape[2])
    # An array mask too: one that repeats an element along the keys is written out for all heads.
    for source in op.inputs[: 3 if query.shape[2] <= VECTOR_QUERIES else 4]:
        if len(source.shape) == 4 and source.strides[-1] != 1:
            copied(op, source)
    # sdpa_vector writes over the queries when it may.
    if query.shape[2] <= VECTOR_QUERIES:
        over_any_or_new(op, [query], out)
        _partial_results(op)
        return
    _, heads, tokens, width = out.shape
    # Tokens before heads in memory: the transpose and reshape that follow are views.
    row = tokens == 1
    strides = (tokens * heads * width, width, heads * width, 1)
    out.set_layout(strides, out.size, row=row, column=False, dense=True)
    op.allocate(out)


def _partial_results(op: Operation) -> None:
    """Few queries and many keys: partial results of blocks of keys, joined by a second pass."""
    (_, heads, queries, _), key = op.inputs[0].shape, op.inputs[1]
    value_dim = op.outputs[0].shape[-1]
    call = VectorCall(
        rows=op.outputs[0].size // value_dim,
        queries=queries,
        keys=key.shape[2],
        group=heads // key.shape[1],
        value_dim=value_dim,
        item_bytes=op.inputs[0].itemsize,
    )
    arrays = op.vector_attention.partial_results(call)
    for elements, itemsize in arrays:
        op.temporary(elements, itemsize)
    if arrays:
        op.kernels += SECOND_PASS_KERNELS


def matmul(op: Operation) -> None:
    """A product; few results of a long inner axis are summed from parts."""
    op.allocate(op.outputs[0])
    op.kernels = 1
    for source in op.inputs[:2]:
        if not _is_product_ready(source):
            copied(op, source)
    _split_inner(op)


def _is_product_ready(source: View) -> bool:
    stride, last = source.strides[-2:]
    return last == 1 or stride == 1


def _split_inner(op: Operation) -> None:
    out, inner = op.outputs[0], op.inputs[0].shape[-1]
    rows, columns = op.inputs[0].shape[-2], out.shape[-1]
    # Nothing is summed where an array is empty.
    if not op.inputs[0].size:
        return
    # A weight without a batch: MLX joins the batch and the rows of the input.
    if op.inputs[1].size == inner * columns:
        rows = op.inputs[0].size // inner
    # Products of a batch are not split.
    elif out.size != rows * columns:
        return
    op.add_parts(op.splits.plain(rows, inner, columns), PART_ITEM_BYTES)


def quantized_matmul(op: Operation) -> None:
    """A product with a packed weight."""
    op.allocate(op.outputs[0])
    op.kernels = 1
    # Indices, where there are any, are read in any layout.
    for source in op.inputs:
        if len(source.shape) > 1 and source.size > 1 and not is_rows(source):
            copied(op, source)
    group_size, *_, is_transposed = op.arguments
    out, (source, weight) = op.outputs[0], op.inputs[:2]
    if is_transposed and len(weight.shape) <= 2:
        inner, columns = source.shape[-1], out.shape[-1]
        parts = op.splits.packed(out.size // columns, inner, columns, group_size)
        op.add_parts(parts, out.itemsize)


def gather_quantized_matmul(op: Operation) -> None:
    """Products with packed weights chosen by the last two inputs."""
    op.allocate(op.outputs[0])
    op.kernels = 1
    for source in op.inputs[:-2]:
        if not is_rows(source):
            copied(op, source)


def sorted_blocks(op: Operation, at_once: int) -> tuple[int, int]:
    """Return the length of the sorted axis, and the blocks of at most ``at_once`` it is cut into.

    Half as many are sorted at once when values are wider than float32 (metal/sort.cpp,
    cuda/sort.cu).
    """
    source = op.inputs[0]
    axis = op.arguments[-1] if op.arguments and isinstance(op.arguments[-1], int) else -1
    block = at_once if source.itemsize <= _FLOAT32 else at_once // 2
    return source.shape[axis], ceil_div(source.shape[axis], block)


def sort(op: Operation) -> None:
    """A sort; a long axis is sorted in blocks that are merged."""
    source = op.inputs[0]
    fresh(op)
    _, blocks = sorted_blocks(op, _SORTED_AT_ONCE)
    if blocks <= 1:
        return
    # sort.cpp, multi_block_sort: values and indices, each read and written in turn.
    for itemsize in (source.itemsize, source.itemsize, 4, 4):
        op.temporary(source.size, itemsize)
    # The blocks, then a partition and a merge for each doubling, then a copy of the result.
    op.kernels = 2 + 2 * (blocks - 1).bit_length()


def scan(op: Operation) -> None:
    """A cumulative sum, over its input where it may be."""
    source, out = op.inputs[0], op.outputs[0]
    op.kernels = 1
    if source.dense and 0 not in source.strides:
        vector(op, source, out)
    else:
        op.allocate(out)
        op.kernels = 2


def kernel(op: Operation) -> None:
    """A kernel written in Python: inputs with gaps are copied, outputs are new."""
    fresh(op)
    for source in op.inputs:
        if not source.row:
            copied(op, source)
