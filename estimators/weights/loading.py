"""What mlx-lm makes of the tensors in files while it loads a model: stacked or converted arrays."""

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from memfit.estimators.weights.tensor_groups import TensorGroup

# mlx-lm deepseek_v3.py, dequant: bfloat16, then the scaled product in float32, and its input.
_FP8_ON_THE_WAY = 2 + 4 + 4
_FP8_OPERATIONS = 8
_BFLOAT16 = 2
# mlx-lm utils.py, _transform_awq_weights: eight integers of each word of four bytes, the same in
# another order and unsigned, and of eight bytes, to which the shifts promote them.
_AWQ_ON_THE_WAY = (3 * 4 * 8 + 8 * 8) // 4
# Dispatches of the CPU: two for each of nine kernels, one for each view.
_AWQ_OPERATIONS = 22
_AWQ_OUTPUTS = 3


class Conversion(NamedTuple):
    """Arrays that are not those of the files."""

    reads: int
    """Tensors of files that one of them is made from."""
    nbytes: int
    """Bytes in use until it is made."""
    temporary: int = 0
    """Bytes that each read takes on the way."""
    operations: int = 2
    """Of each read, in addition to the read: a view and a copy where arrays are stacked."""
    outputs: int = 1
    """Arrays that are made of it: weights, scales and biases."""


class CutArray(NamedTuple):
    """An array of files that a rank reads, and what it keeps of it."""

    read_bytes: int
    kept_bytes: int
    """As many, where it is not cut."""
    kept_elements: int


def conversions(
    kept: Iterable[TensorGroup], loaded: Iterable[TensorGroup]
) -> tuple[Conversion, ...]:
    """Return what is made of the ``kept`` tensors of files, to become the ``loaded`` ones."""
    return tuple(_conversions(kept, {group.name: group for group in loaded}))


def _conversions(
    kept: Iterable[TensorGroup], loaded: dict[str, TensorGroup]
) -> Iterator[Conversion]:
    for group in kept:
        # The scales of blocks are read with their weights, and end in none of the arrays.
        if group.name.endswith("weight_scale_inv"):
            continue
        same = loaded.get(group.name)
        # Renamed and split arrays are views of those that were read.
        stacked = group.copies if same is None and group.copies > 1 else 0
        elements = prod(group.shape)
        if group.dtype.startswith("F8") and (stacked or (same and same.dtype != group.dtype)):
            temporary = group.nbytes + _FP8_ON_THE_WAY * elements
            held = stacked * _BFLOAT16 * elements
            yield Conversion(group.copies, held, temporary, _FP8_OPERATIONS)
        elif group.name.endswith(".qweight") and same is None:
            temporary = _AWQ_ON_THE_WAY * group.nbytes
            yield Conversion(group.copies, 0, temporary, _AWQ_OPERATIONS, _AWQ_OUTPUTS)
        elif stacked:
            yield Conversion(stacked, stacked * group.nbytes)
        elif same is None and ".kv_b_proj." in group.name:
            # Transposed to one matrix for each head (mlx-lm deepseek_v3.py, sanitize).
            yield Conversion(1, group.nbytes)
