"""A model with an adapter: its tensors stay in memory, and each of its products takes workspace."""

from collections import Counter
from collections.abc import KeysView, Mapping

from msgspec.structs import replace

from memfit.estimators.arch.model import LowRank, Model, Module
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import CheckpointError, OtherModelError, UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.adapters import Adapter
from memfit.estimators.results.estimate import Note
from memfit.estimators.weights.footprint import WeightFootprint

_WORD_BITS = 32


def with_adapter(
    model: Model, footprint: WeightFootprint, adapter: Adapter
) -> tuple[Model, WeightFootprint]:
    """Return a model and its weights with an adapter, in the layout that mlx-lm loads.

    Raises:
        CheckpointError: when one of a pair of matrices is missing.
        OtherModelError: for an adapter of another model.
        UnsupportedError: for matrices that mlx-lm's DoRA does not take.
    """
    found = _low_rank(adapter)
    _require_shapes(model, adapter, found.keys())
    _require_dora(model, footprint, found)
    layers = []
    for index, layer in enumerate(model.layers):
        prefix = f"{model.layers_path}.{index}."
        modules = tuple(
            _marked(module, found.pop(prefix + module.path, None)) for module in layer.modules
        )
        layers.append(replace(layer, modules=modules))
    # A model that only the trace knows has no layers here, and no products to count.
    uncounted = list(found)[:1] if layers else []
    extra = Counter(tensor.nbytes for tensor in adapter.tensors)
    total = sum(size * count for size, count in extra.items())
    footprint = replace(
        footprint,
        nbytes=footprint.nbytes + total,
        by_part={**footprint.by_part, "other": footprint.by_part["other"] + total},
        sizes=footprint.sizes + extra,
        notes=(*footprint.notes, *map(_uncounted, uncounted)),
    )
    return replace(model, layers=tuple(layers)), footprint


def _low_rank(adapter: Adapter) -> dict[str, LowRank]:
    """Return the low-rank matrices by the path of the module that each is added to."""
    tensors = {tensor.name: tensor for tensor in adapter.tensors}
    found = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if last == "lora_b" and len(tensor.shape) in (2, 3):
            # (rank, outputs), of experts (experts, outputs, rank).
            rank = tensor.shape[0] if len(tensor.shape) == 2 else tensor.shape[-1]
            width = dtypes.nbytes(1, tensor.dtype)
            found[path] = LowRank(rank, width, f"{path}.m" in tensors)
    return found


def _require_shapes(model: Model, adapter: Adapter, found: KeysView[str]) -> None:
    tensors = {tensor.name: tensor.shape for tensor in adapter.tensors}
    if found and found.isdisjoint(path for path, _ in model.all_modules()):
        raise OtherModelError(
            f"{adapter.id}: it changes {printable(min(found))} and others, none of which the model"
            " has; is it the model that the adapter was trained on?"
        )
    for path, module in model.all_modules():
        # (inputs, rank) and (rank, outputs); of experts (experts, rank, inputs) and the reverse.
        first, last = (tensors.get(f"{path}.lora_{name}", ()) for name in "ab")
        outer = first[:1] + last[1:2] + first[2:3]
        if bool(first) != bool(last):
            raise CheckpointError(
                f"{adapter.id}: {path}: lora_a or lora_b is missing, both are needed"
            )
        is_known = len(first) == len(last) and sorted(outer) == sorted(module.shape)
        is_other = bool(first or last) and not is_known
        if is_other:
            raise OtherModelError(
                f"{adapter.id}: {path}.lora_b: the model has this parameter in another shape; is it"
                " the model that the adapter was trained on?"
            )


def _require_dora(model: Model, footprint: WeightFootprint, found: Mapping[str, LowRank]) -> None:
    plan = footprint.plan
    for path, module in model.all_modules():
        low_rank = found.get(path)
        if low_rank is None or not low_rank.rescales:
            continue
        # mlx-lm tuner/utils.py, to_lora, and tuner/dora.py, from_base.
        if len(module.shape) > 2:
            raise UnsupportedError(f"{path}: mlx-lm has no DoRA for stacked experts")
        packing = plan.quantization(path, module) if plan else None
        if packing and _WORD_BITS % packing.bits:
            raise UnsupportedError(
                f"{path}: mlx-lm's DoRA miscounts the columns of a matrix with {packing.bits} bits,"
                " and fails; 2, 4, 8 and 16 bits work"
            )


def _marked(module: Module, low_rank: LowRank | None) -> Module:
    return replace(module, low_rank=low_rank) if low_rank else module


def _uncounted(path: str) -> Note:
    text = (
        f"{printable(path)}: the adapter changes a module outside of the layers; the formula counts"
        " its weights and not its products, --method trace counts both"
    )
    return Note("warning", "adapter", text)
