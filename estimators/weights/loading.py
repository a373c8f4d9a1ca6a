"""What mlx-lm makes of the tensors in files while it loads a model: stacked or converted arrays."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.weights.derived import TensorGroup

# mlx-lm deepseek_v3.py, dequant: bfloat16, padded, and in float32, where it is scaled.
_FP8_ON_THE_WAY = 2 + 2 + 4
_FP8_LOADS = 2
_BFLOAT16 = 2
# mlx-lm bailing_moe.py, sanitize: cast to float32, the squares (mlx linalg.cpp, l2_norm), and the
# quotient.
_NORMALISED_ON_THE_WAY = 3 * 4
READS_IN_FLIGHT = 110
"""Reads of the tasks under way and of the open one: MAX_ACTIVE_TASKS (mlx transforms.cpp) and one
more, of ten each (mlx cpu/encoder.h)."""
# mlx-lm utils.py, _transform_awq_weights: eight integers of each word of four bytes in another
# order and unsigned, of eight bytes, to which the shifts promote them, shifted, and their sum. The
# integers as they are unpacked are gone when a layer's matrices, step by step, come to that.
_AWQ_ON_THE_WAY = (2 * 4 * 8 + 2 * 8 * 8 + 8) // 4
_AWQ_LOADS = 3


class Conversion(NamedTuple):
    """Arrays that are not those of the files."""

    reads: int
    """Tensors of files that one of them is made from."""
    nbytes: int
    """Bytes in use until it is made."""
    temporary: int = 0
    """Bytes that each read takes on the way."""
    loads: int = 1
    """Arrays of files that each read is made of: a weight, its scales and its zero points."""
    layer: str = ""
    """The part of its name up to the number of its layer."""
    layer_arrays: int = 1
    """Arrays that the layer has once it is loaded."""
    elements: int = 0
    """Of the array that is made; 0 where that is packed."""


class CutArray(NamedTuple):
    """An array of files that a rank reads, and what it keeps of it."""

    read_bytes: int
    kept_bytes: int
    """As many, where it is not cut."""
    kept_elements: int
    layer: str = ""
    """The part of its name up to the number of its layer."""


class FirstArray(NamedTuple):
    """An array that is made before all others, of the last one in the class."""

    nbytes: int
    on_the_way_bytes: int
    """Bytes that it is made from, and of arrays between."""
    ahead_bytes: int
    """Bytes of the arrays that are read from files meanwhile."""


def normalised_head(
    kept: Sequence[TensorGroup], config: Mapping[str, Any]
) -> tuple[FirstArray, ...]:
    """Return the head that mlx-lm divides by its columns' norms, packed or not; most have none.

    MLX evaluates the last arrays of a class first (mlx transforms.cpp, eval_impl).
    """
    head = next((group for group in kept if group.name == "lm_head.weight"), None)
    rules = row_or_default(str(config.get("model_type")))
    if head is None or not (rules.normalises_head and config.get("norm_head")):
        return ()
    # The embedding is the first array of the class, so that it is read last.
    others = (group for group in kept if group is not head and "embeddings" not in group.name)
    largest = sorted(others, key=lambda group: group.nbytes, reverse=True)
    ahead, left = 0, READS_IN_FLIGHT
    for group in largest:
        count = min(left, group.copies)
        ahead, left = ahead + count * group.nbytes, left - count
    on_the_way = head.nbytes + _NORMALISED_ON_THE_WAY * prod(head.shape)
    return (FirstArray(head.nbytes, on_the_way, ahead),)


def conversions(
    kept: Iterable[TensorGroup], loaded: Iterable[TensorGroup]
) -> tuple[Conversion, ...]:
    """Return what is made of the ``kept`` tensors of files, to become the ``loaded`` ones."""
    by_name = {group.name: group for group in loaded}
    arrays = Counter(layer_of(name) for name in by_name)
    return tuple(
        conversion._replace(
            layer=layer,
            layer_arrays=max(1, arrays[layer]),
            elements=0 if group.name.endswith(".qweight") else group.copies * prod(group.shape),
        )
        for group in kept
        if (conversion := _conversion(group, by_name.get(group.name)))
        for layer in (layer_of(group.name),)
    )


def layer_of(name: str) -> str:
    """Return a name up to its first number.

    >>> layer_of("model.layers.12.mlp.experts.*.w1.weight")
    'model.layers.12'
    """
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""


def _conversion(group: TensorGroup, same: TensorGroup | None) -> Conversion | None:
    """Return what is made of a group; ``same`` is the loaded one with its name."""
    # The scales of blocks are read with their weights, and end in none of the arrays.
    if group.name.endswith("weight_scale_inv"):
        return None
    # Renamed and split arrays are views of those that were read.
    stacked = group.copies if same is None and group.copies > 1 else 0
    elements = prod(group.shape)
    if group.dtype.startswith("F8") and (stacked or (same and same.dtype != group.dtype)):
        temporary = group.nbytes + _FP8_ON_THE_WAY * elements
        nbytes = stacked * _BFLOAT16 * elements
        return Conversion(group.copies, nbytes, temporary, _FP8_LOADS)
    if group.dtype.startswith("F8") and ".kv_b_proj." in group.name:
        nbytes, temporary = _BFLOAT16 * elements, group.nbytes + _FP8_ON_THE_WAY * elements
        return Conversion(1, nbytes, temporary, _FP8_LOADS)
    if group.name.endswith(".qweight") and same is None:
        temporary = _AWQ_ON_THE_WAY * group.nbytes
        return Conversion(group.copies, 0, temporary, _AWQ_LOADS)
    if stacked:
        return Conversion(stacked, stacked * group.nbytes)
    if same is None and ".kv_b_proj." in group.name:
        # Transposed to one matrix for each head (mlx-lm deepseek_v3.py, sanitize).
        return Conversion(1, group.nbytes)
    return None
