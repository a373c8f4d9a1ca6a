"""Which part of a model is on the GPU, and which on the host.

Source: src/llama-model.cpp, load_tensors (commit 0c1e57098): the last layers are on the GPU, the
head being the very last; what is before the first layer stays on the host.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Part
from memfit.estimators.base.units import round_up
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.machine.device import Backend
from memfit.estimators.runtimes.llama_cpp.ggml import Place
from memfit.estimators.weights.ggml import part_of

ALIGNMENT = 32  # general.alignment's default, and ggml's own (ggml-backend)
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_HEAD, _TIED = "output.weight", "token_embd.weight"
_INPUTS = re.compile(r"(per_layer_)?token_embd.*|position_embd.*|token_types.*")


class Placement(Struct, frozen=True):
    """Where each layer is; the head is the layer behind the last block."""

    backend: Backend
    """The GPU's kind; "cpu" is none."""
    blocks: int
    """All blocks, with those that predict ahead."""
    gpu_layers: int
    host_experts: int = 0
    """Layers, from the first, with their experts on the host."""

    def of(self, index: int) -> Place:
        """Return where a layer is."""
        return Place.GPU if index > self.blocks - self.gpu_layers else Place.HOST

    def of_experts(self, index: int) -> Place:
        """Return where a layer's experts are."""
        return Place.HOST if index < self.host_experts else self.of(index)


class Matrix(Struct, frozen=True):
    """Tensors of one layer in one place, in bytes as they are loaded."""

    layer: int | None
    """None for what is before the first layer."""
    is_expert: bool
    nbytes: int


class Weights(Struct, frozen=True):
    """The weights of a model by layer, and the matrices that a GPU may have to copy."""

    blocks: int
    matrices: tuple[Matrix, ...]
    tied_bytes: int
    """The embedding's matrix where it is the head's too: with a layer on the GPU it is in both."""
    largest: dict[str, int]
    """Bytes of the largest matrix of each name in any block."""
    nbytes: int
    elements: int

    def of(self, name: str, elements: int) -> int:
        """Return the bytes of a matrix, at the average where its name is not known."""
        known = self.largest.get(name)
        return -(-elements * self.nbytes // self.elements) if known is None else known

    def by_place(self, placement: Placement) -> Counter[Place]:
        """Return the bytes in each memory."""
        found: Counter[Place] = Counter()
        for matrix in self.matrices:
            found[_place(matrix, placement)] += matrix.nbytes
        if placement.of(self.blocks) is Place.GPU:
            found[Place.GPU] += self.tied_bytes
        return found

    def of_layer(self, index: int, placement: Placement) -> Counter[Place]:
        """Return the bytes of one layer in each memory."""
        found: Counter[Place] = Counter()
        for matrix in self.matrices:
            if matrix.layer == index:
                found[_place(matrix, placement)] += matrix.nbytes
        return found


def _place(matrix: Matrix, placement: Placement) -> Place:
    if matrix.layer is None:
        return Place.HOST
    return placement.of_experts(matrix.layer) if matrix.is_expert else placement.of(matrix.layer)


@lru_cache(maxsize=16)
def file_weights(tensors: tuple[Tensor, ...], trunk: int, elements: int) -> Weights:
    """Return the weights of a GGUF file; blocks from ``trunk`` on are not loaded."""
    largest: dict[str, int] = {}
    sums: Counter[tuple[int | None, bool]] = Counter()
    found = [(tensor, _BLOCK.fullmatch(tensor.name)) for tensor in tensors]
    blocks = max((int(match[1]) + 1 for _, match in found if match), default=0)
    for tensor, match in found:
        name = match[2] if match else tensor.name
        largest[name] = max(tensor.nbytes, largest.get(name, 0))
        layer = int(match[1]) if match else _layer(name, blocks)
        if not match or int(match[1]) < trunk:
            sums[layer, "_exps." in name] += round_up(tensor.nbytes, ALIGNMENT)
    tied = 0 if _HEAD in largest else largest.get(_TIED, 0)
    largest.setdefault(_HEAD, tied)
    return _weights(sums, blocks, tied, largest, sum(t.nbytes for t in tensors), elements)


def _layer(name: str, blocks: int) -> int | None:
    """The layer of a tensor outside the blocks; a projector is on the GPU with none of them."""
    if _INPUTS.fullmatch(name):
        return None
    return blocks + (part_of(name) is Part.VISION)


def config_weights(model: Model, *, nbytes: int, elements: int) -> Weights:
    """Return the weights of a checkpoint by the share of its elements in each layer."""
    sums: Counter[tuple[int | None, bool]] = Counter()
    blocks = len(model.layers)
    tied = 0

    def size(count: int) -> int:
        return -(-count * nbytes // max(1, elements))

    for module in model.modules:
        is_input = module.part is Part.EMBEDDING
        sums[None if is_input else blocks, False] += size(module.elements + module.bias)
        tied = max(tied, size(module.elements)) if is_input and model.tied_head else tied
    for index, layer in enumerate(model.layers):
        for module in layer.modules:
            routed = module.part is Part.EXPERTS
            sums[index, routed] += size(module.elements + module.bias)
    largest = {_HEAD: tied} if tied else {}
    return _weights(sums, blocks, tied, largest, nbytes, elements)


def _weights(
    sums: Counter[tuple[int | None, bool]],
    blocks: int,
    tied: int,
    largest: dict[str, int],
    nbytes: int,
    elements: int,
) -> Weights:
    matrices = (Matrix(layer, routed, size) for (layer, routed), size in sums.items())
    return Weights(blocks, tuple(matrices), tied, largest, nbytes, max(1, elements))


def layer_lines(weights: Weights, placement: Placement, layers: int) -> Iterator[str]:
    """Yield where each layer's weights are, equal layers that follow each other in one line."""
    rows = [
        (index, placement.of(index), tuple(sorted(weights.of_layer(index, placement).items())))
        for index in range(layers)
    ]
    first = 0
    for index, row in enumerate(rows):
        if index + 1 == layers or rows[index + 1][1:] != row[1:]:
            named = f"layer {first}" if first == index else f"layers {first} to {index}"
            sizes = " and ".join(f"{size} bytes on the {_NAMES[place]}" for place, size in row[2])
            yield f"{named}: caches on the {_NAMES[row[1]]}, weights of each {sizes}"
            first = index + 1


_NAMES = {Place.GPU: "GPU", Place.HOST: "host"}
