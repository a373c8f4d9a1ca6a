"""Experts as slots: the bytes of one in each layer, and how start-up reads them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from memfit.estimators.arch.model import Model, Part
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import ceil_div
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.results.terms import Basis
from memfit.estimators.weights.derived import QuantizationPlan, part_of, tensor_bytes
from memfit.estimators.weights.footprint import WeightFootprint

# mlx-lm utils.py, make_shards: a tensor that would make a file larger begins the next one.
SHARD_BYTES = 5 * 2**30
# mlx-moe keeps a 4-byte slot number and a 4-byte mask per expert of every layer.
LOOKUP_BYTES = 8
_NUMBER = re.compile(r"\.(\d+)\.")
_SINGLE = re.compile(r"\.experts\.\d+\.")


class Piece(NamedTuple):
    """One tensor, in the order of the files."""

    nbytes: int
    layer: int | None = None
    """The layer of an expert tensor, None for other tensors."""
    stack: str | None = None
    """Of one expert's tensor the stack that it becomes a part of; a stack itself has none.

    A stack has all experts of the layer, and has to be read whole to copy some.
    """


class ExpertLayer(Struct, frozen=True):
    index: int
    experts: int
    top_k: int
    shared: bool
    slot_bytes: int
    """Gate, up and down projection of one expert, with scales and biases."""


class Inventory(Struct, frozen=True):
    """A model's experts, its other weights, and all tensors in the order of the files."""

    layers: tuple[ExpertLayer, ...]
    non_expert_bytes: int
    pieces: tuple[Piece, ...]
    basis: Basis

    @property
    def experts(self) -> int:
        """Experts per layer, the same in every layer."""
        return self.layers[0].experts

    @property
    def top_k(self) -> int:
        """Experts per token in a layer."""
        return self.layers[0].top_k

    @property
    def slot_bytes(self) -> int:
        return max(layer.slot_bytes for layer in self.layers)

    @property
    def lookup_bytes(self) -> int:
        """Bytes of mlx-moe's tables from expert to slot."""
        return LOOKUP_BYTES * sum(layer.experts for layer in self.layers)

    def held_bytes(self, capacities: Sequence[int]) -> int:
        """Return the bytes of ``capacities`` experts, one number per layer."""
        return sum(n * layer.slot_bytes for n, layer in zip(capacities, self.layers, strict=True))

    @property
    def expert_bytes(self) -> int:
        return self.held_bytes([layer.experts for layer in self.layers])


def require_capacity(capacity: int, experts: int, top_k: int) -> None:
    """Require a number of experts to keep that a layer can have.

    Raises:
        InputError: when it cannot.
    """
    if not top_k <= capacity <= experts:
        raise InputError(
            f"capacity {capacity}: this model routes a token to {top_k} of {experts} experts per"
            f" layer; give {top_k} to {experts}"
        )


def inventory(
    model: Model, tensors: Iterable[Tensor] | None, footprint: WeightFootprint
) -> Inventory:
    """Return the experts of a model, from its tensors when the runtime loads them unchanged.

    Raises:
        UnsupportedError: when it has no experts, when its layers have different numbers of
            experts, or when the bytes of its weights are only a bound.
    """
    routed = model.experts()
    if not routed:
        raise UnsupportedError(f"{model.model_type}: no layer has routed experts")
    if len({(moe.experts, moe.top_k) for moe in routed.values()}) > 1:
        raise UnsupportedError(f"{model.model_type}: its layers have different numbers of experts")
    if footprint.basis == "bound":
        raise UnsupportedError(
            f"{model.model_type}: its weights are only known as a bound; convert it with"
            f" mlx_lm.convert, or give {setting('quantize')}"
        )
    as_stored = footprint.nbytes - footprint.unloaded_bytes == footprint.loaded_bytes
    if tensors is not None and as_stored:
        pieces = tuple(_stored(model, tensors))
    else:
        pieces = tuple(_derived(model, footprint.plan))
    of_layer: Counter[int] = Counter()
    for piece in pieces:
        if piece.layer is not None:
            of_layer[piece.layer] += piece.nbytes
    if of_layer.keys() != routed.keys():
        raise UnsupportedError(
            f"{model.model_type}: not every layer's experts are among its tensors"
        )
    layers = tuple(
        ExpertLayer(
            index,
            moe.experts,
            moe.top_k,
            bool(moe.shared_intermediate),
            ceil_div(of_layer[index], moe.experts),
        )
        for index, moe in routed.items()
    )
    other = footprint.loaded_bytes - of_layer.total()
    return Inventory(layers, other, pieces, footprint.basis)


def startup_bytes(experts: Inventory, capacities: Sequence[int]) -> int:
    """Return the peak while mlx-moe fills its slots through ``mx.load``.

    It reads one file at a time: the stacked tensors of that file are in memory until the kept
    experts are copied (mlx-moe lazy_experts/core.py, upgrade_to_predictive). The result equals
    the published 23.05 GB of Qwen3-Coder-Next with 208 experts. With every expert in a slot
    nothing is copied: mlx-lm loads the tensors in place.
    """
    if all(n == layer.experts for layer, n in zip(experts.layers, capacities, strict=True)):
        return experts.non_expert_bytes + experts.expert_bytes
    kept = {layer.index: n for layer, n in zip(experts.layers, capacities, strict=True)}
    filled = most = 0
    for file in _files(experts.pieces):
        own = [piece for piece in file if piece.layer is not None]
        filled += sum(
            p.nbytes * kept[p.layer] // experts.experts for p in own if p.layer is not None
        )
        most = max(most, filled + sum(piece.nbytes for piece in own if not piece.stack))
    return experts.non_expert_bytes + most


def layered_startup_bytes(experts: Inventory, capacities: Sequence[int]) -> int:
    """Return the peak while ``memfit tune experts`` fills its slots.

    It reads one stacked tensor after another, the largest of a layer last, and copies the kept
    experts out of it: what is kept so far and one whole tensor are in memory. Tensors of single
    experts are stacked first: both forms are there before the kept ones are copied.
    """
    filled = most = 0
    for layer, kept in zip(experts.layers, capacities, strict=True):
        filled += kept * layer.slot_bytes
        own = [piece for piece in experts.pieces if piece.layer == layer.index]
        stacked = max((piece.nbytes for piece in own if not piece.stack), default=0)
        stacks: Counter[str] = Counter()
        for piece in own:
            if piece.stack:
                stacks[piece.stack] += piece.nbytes
        joined = max(stacks.values(), default=0)
        joining = max(joined, 2 * joined - joined * kept // layer.experts)
        most = max(most, filled + max(joining, 0 if kept == layer.experts else stacked))
    return experts.non_expert_bytes + most


def _files(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    file: list[Piece] = []
    size = 0
    for piece in pieces:
        if file and size + piece.nbytes > SHARD_BYTES:
            yield file
            file, size = [], 0
        file.append(piece)
        size += piece.nbytes
    yield file


def _stored(model: Model, tensors: Iterable[Tensor]) -> Iterator[Piece]:
    modules = dict(model.all_modules())
    for tensor in tensors:
        module = modules.get(tensor.name) or modules.get(tensor.name.rpartition(".")[0])
        part = module.part if module else part_of(tensor.name)
        number = _NUMBER.search(tensor.name)
        layer = int(number[1]) if number else None
        if part is not Part.EXPERTS or layer is None:
            yield Piece(tensor.nbytes)
        elif layer < len(model.layers):  # later layers are multi-token prediction heads
            stack, count = _SINGLE.subn(".experts.", tensor.name)
            yield Piece(tensor.nbytes, layer, stack if count else None)


def _derived(model: Model, plan: QuantizationPlan | None) -> Iterator[Piece]:
    first, *rest = model.modules
    layers = [
        (index, f"{model.layers_path}.{index}.{module.path}", module)
        for index, layer in enumerate(model.layers)
        for module in layer.modules
    ]
    # The order of mlx-lm's classes: the embedding, the layers, norm and head.
    outside = [(None, module.path, module) for module in rest]
    for index, path, module in [(None, first.path, first), *layers, *outside]:
        if not module.loaded:
            continue
        quantization = plan.quantization(path, module) if plan else None
        for nbytes in tensor_bytes(module, model.dtype, quantization):
            yield Piece(nbytes, index if module.part is Part.EXPERTS else None)
