"""The weights that one of several ranks holds, and what it reads to make them."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Module
from memfit.estimators.arch.ranks import cut_of, divided
from memfit.estimators.arch.registry import Cut
from memfit.estimators.base import dtypes
from memfit.estimators.base.ranks import Rank
from memfit.estimators.weights.derived import QuantizationPlan, part_of, tensor_bytes
from memfit.estimators.weights.footprint import WeightFootprint
from memfit.estimators.weights.loading import CutArray, layer_of

# MLX packs integers of few bits into words of this many bytes (mlx ops.cpp, quantize).
_WORD = 4


class _Array(NamedTuple):
    """A loaded array of the whole model."""

    path: str
    """Of its module."""
    module: Module | None
    is_bias: bool
    columns: int
    """Its last dimension, in packed words or groups where it is packed."""
    itemsize: int
    nbytes: int
    copies: int


def rank_footprint(
    footprint: WeightFootprint, model: Model, share: Model, rank: Rank
) -> WeightFootprint:
    """Return the weights of a rank; ``share`` is its part of ``model``.

    Raises:
        UnsupportedError: when a packed matrix does not divide among the ranks.
    """
    if rank.parallel == "pipeline":
        kept = {path for path, _ in share.all_modules()}
        arrays = [(array, array.nbytes) for array in _arrays(footprint, model, kept)]
        return _with_arrays(footprint, share, arrays, ())
    parts = [(array, _part(array, model, rank.size)) for array in _arrays(footprint, model)]
    order = {path: number for number, (path, _) in enumerate(model.all_modules())}
    # MLX evaluates the last arrays of a module tree first (mlx transforms.cpp, eval_impl).
    parts.sort(key=lambda each: -order.get(each[0].path, 0))
    cut = tuple(
        CutArray(array.nbytes, part, part // array.itemsize, layer_of(f"{array.path}."))
        for array, part in parts
        for _ in range(array.copies)
    )
    sliced = sum(
        (array.nbytes - part) * array.copies
        for array, part in parts
        if cut_of(model, array.path) is Cut.SLICE
    )
    return replace(_with_arrays(footprint, share, parts, cut), sliced_bytes=sliced)


def _arrays(
    footprint: WeightFootprint, model: Model, kept: set[str] | None = None
) -> Iterator[_Array]:
    """Yield the arrays of a model, without those of layers that are not ``kept``; None: all are."""
    modules = dict(model.all_modules())
    layers = f"{model.layers_path}."

    def is_elsewhere(path: str) -> bool:
        return kept is not None and path not in kept and path.startswith(layers)

    if not footprint.loaded:
        for path, module in modules.items():
            if module.loaded and not is_elsewhere(path):
                yield from _derived(path, module, model.dtype, footprint.plan)
        return
    for group in footprint.loaded:
        parent, _, kind = group.name.rpartition(".")
        path = parent if parent in modules else group.name
        if is_elsewhere(path):
            continue
        is_bias = path == parent and kind == "bias"
        columns = group.shape[-1] if group.shape else 1
        itemsize = max(1, dtypes.BITS[group.dtype] // 8)
        nbytes, copies = group.nbytes, group.copies
        yield _Array(path, modules.get(path), is_bias, columns, itemsize, nbytes, copies)


def _derived(
    path: str, module: Module, dtype: str, plan: QuantizationPlan | None
) -> Iterator[_Array]:
    packed = plan.quantization(path, module) if plan else None
    *sizes, last = tensor_bytes(module, dtype, packed)
    weights = sizes if module.bias else [*sizes, last]
    # The groups of a packed row: its words divide where they do.
    columns = module.shape[-1] // packed.group_size if packed else module.shape[-1]
    width = dtypes.nbytes(1, "F32" if module.float32 else dtype)
    for nbytes in weights:
        itemsize = _WORD if packed and nbytes == weights[0] else width
        yield _Array(path, module, False, columns, itemsize, nbytes, 1)
    if module.bias:
        yield _Array(path, module, True, module.bias, width, last, 1)


def _part(array: _Array, model: Model, size: int) -> int:
    """Return the bytes of an array that a rank keeps."""
    cut = cut_of(model, array.path)
    if cut is None or (array.is_bias and cut is Cut.INPUTS):
        return array.nbytes
    parts = size
    if cut is Cut.KV_HEADS:
        heads = min((buffer.heads for buffer in model.kv_buffers()), default=size)
        parts = min(size, heads)
    if cut is Cut.INPUTS:
        divided(array.columns, parts, f"{array.path}: words or groups of a row")
    return divided(array.nbytes, parts, f"{array.path}: bytes")


def _with_arrays(
    footprint: WeightFootprint,
    share: Model,
    arrays: list[tuple[_Array, int]],
    cut: tuple[CutArray, ...],
) -> WeightFootprint:
    sizes: Counter[int] = Counter()
    parts = dict.fromkeys(footprint.by_part, 0)
    for array, nbytes in arrays:
        sizes[nbytes] += array.copies
        part = array.module.part if array.module else part_of(array.path)
        parts[part.value] += nbytes * array.copies
    return replace(
        footprint,
        nbytes=sum(parts.values()),
        by_part=parts,
        parameters=sum(m.elements + m.bias for _, m in share.all_modules() if m.loaded),
        sizes=sizes,
        unloaded_by_part={},
        cut=cut,
        loaded=(),
        converted_from=(),
        first=(),
    )
