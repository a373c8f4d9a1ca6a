"""Which part of a model is on the GPU, and which on the host.

Source: src/llama-model.cpp, load_tensors (commit 0c1e57098): the last layers are on the GPU, the
head being the very last; what is before the first layer stays on the host.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Module, Part
from memfit.estimators.base.units import ceil_div, round_up
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.machine.device import Backend
from memfit.estimators.runtimes.llama_cpp.ggml import Place
from memfit.estimators.runtimes.llama_cpp.overrides import Override, place_of
from memfit.estimators.weights.derived import QuantizationPlan, tensor_bytes
from memfit.estimators.weights.ggml import part_of

ALIGNMENT = 32  # general.alignment's default, and ggml's own (ggml-backend)
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_HEAD, _TIED = "output.weight", "token_embd.weight"
_EXPERTS, _JOINED = "_exps.", "ffn_up.weight"
_Key = tuple[int | None, bool, str]
"""A matrix's layer, whether it is of experts, and its name where that matters."""
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
    overrides: tuple[Override, ...] = ()
    kv_offload: bool = True
    projector_offload: bool = True

    def of_cache(self, index: int) -> Place:
        """Return where a layer's caches and states are."""
        return self.of(index) if self.kv_offload else Place.HOST

    def of(self, index: int) -> Place:
        """Return where a layer is."""
        return Place.GPU if index > self.blocks - self.gpu_layers else Place.HOST

    def of_experts(self, index: int) -> Place:
        """Return where a layer's experts are."""
        return Place.HOST if index < self.host_experts else self.of(index)

    def of_matrix(self, matrix: "Matrix") -> Place:
        """Return where tensors are."""
        usual = Place.HOST
        if matrix.layer is not None and (matrix.layer <= self.blocks or self.projector_offload):
            usual = self.of_experts(matrix.layer) if matrix.is_expert else self.of(matrix.layer)
        return place_of(self.overrides, matrix.name, usual) if matrix.name else usual


class Matrix(Struct, frozen=True):
    """Tensors of one layer in one place, in bytes as they are loaded."""

    layer: int | None
    """None for what is before the first layer."""
    is_expert: bool
    nbytes: int
    name: str = ""
    """The tensor's name where each is placed by its own, else empty."""


class Weights(Struct, frozen=True):
    """The weights of a model by layer, and the matrices that a GPU may have to copy."""

    blocks: int
    matrices: tuple[Matrix, ...]
    tied_bytes: int
    """The embedding's matrix where it is the head's too: with a layer on the GPU it is in both."""
    largest: dict[str, int]
    """Bytes of the largest matrix of each name in any block."""
    averages: dict[bool, tuple[int, int]]
    """Bytes and elements of all that is not of experts, and of all experts."""
    rows: dict[str, int] = {}
    """Outputs of the matrices of a file, by their names in any block."""
    sizes: dict[tuple[int, str], int] = {}
    """Bytes of the matrices of a file by block and name."""

    def of(self, name: str, elements: int, layer: int = -1) -> int:
        """Return the bytes of a matrix, at the average of its kind where its name is not known."""
        if (layer, name) in self.sizes:
            return self.sizes[layer, name]
        if name in self.largest:
            return self.largest[name]
        nbytes, count = self.averages[_EXPERTS in name]
        return ceil_div(elements * nbytes, count)

    def joins_gate(self, suffix: str) -> bool:
        """Whether one matrix makes a block's gate and what it gates, as Phi-3's does."""
        if f"ffn_gate_up{suffix}.weight" in self.largest:
            return True
        names = [f"ffn_{name}{suffix}.weight" in self.largest for name in ("up", "gate")]
        return names == [True, False]

    def numbers(self, name: str) -> int:
        """Return the outputs of a matrix or the length of a vector, 0 where it is not known."""
        return self.rows.get(name, 0)

    @property
    def joins_queries(self) -> bool:
        """Whether one matrix makes queries, keys and values."""
        return "attn_qkv.weight" in self.largest and "attn_q.weight" not in self.largest

    def by_place(self, placement: Placement) -> Counter[Place]:
        """Return the bytes in each memory."""
        found: Counter[Place] = Counter()
        for matrix in self.matrices:
            found[placement.of_matrix(matrix)] += matrix.nbytes
        if placement.of(self.blocks) is Place.GPU:
            found[Place.GPU] += self.tied_bytes
        return found

    def of_layer(self, index: int, placement: Placement) -> Counter[Place]:
        """Return the bytes of one layer in each memory."""
        found: Counter[Place] = Counter()
        for matrix in self.matrices:
            if matrix.layer == index:
                found[placement.of_matrix(matrix)] += matrix.nbytes
        return found


@lru_cache(maxsize=16)
def file_weights(tensors: tuple[Tensor, ...], trunk: int, *, named: bool = False) -> Weights:
    """Return the weights of a GGUF file; blocks from ``trunk`` on are not loaded.

    ``named``: with each tensor on its own, for overrides of its place.
    """
    largest: dict[str, int] = {}
    rows: dict[str, int] = {}
    by_layer: dict[tuple[int, str], int] = {}
    sums: Counter[_Key] = Counter()
    counts: Counter[bool] = Counter()
    found = [(tensor, _BLOCK.fullmatch(tensor.name)) for tensor in tensors]
    blocks = max((int(match[1]) + 1 for _, match in found if match), default=0)
    for tensor, match in found:
        name = match[2] if match else tensor.name
        largest[name] = max(tensor.nbytes, largest.get(name, 0))
        rows[name] = max(tensor.shape[-1:] or (0,))
        if match:
            by_layer[int(match[1]), name] = tensor.nbytes
        layer = int(match[1]) if match else _layer(name, blocks)
        if not match or int(match[1]) < trunk:
            key = layer, _EXPERTS in name, tensor.name if named else ""
            sums[key] += round_up(tensor.nbytes, ALIGNMENT)
            counts[_EXPERTS in name] += prod(tensor.shape)
    tied = 0 if _HEAD in largest else largest.get(_TIED, 0)
    largest.setdefault(_HEAD, tied)
    return replace(_weights(sums, blocks, tied, largest, counts), rows=rows, sizes=by_layer)


def _layer(name: str, blocks: int) -> int | None:
    """The layer of a tensor outside the blocks; a projector is on the GPU with none of them."""
    if _INPUTS.fullmatch(name):
        return None
    return _outside(blocks, part_of(name))


def _outside(blocks: int, part: Part) -> int:
    """The layer of the head, or behind it that of a projector."""
    return blocks + (part is Part.VISION)


def config_weights(
    model: Model, plan: QuantizationPlan | None = None, nbytes: int | None = None
) -> Weights:
    """Return the weights of a checkpoint, each tensor in its own format.

    Where the formats of the ``plan`` do not give the ``nbytes`` that are loaded, each tensor has
    its share of them.
    """
    blocks = len(model.layers)
    own: Counter[_Key] = Counter()
    counts: Counter[bool] = Counter()
    tied = joined = 0
    for layer, path, module in _modules(model):
        format_ = plan.quantization(path, module) if plan else None
        size = sum(tensor_bytes(module, model.dtype, format_))
        is_expert = module.part is Part.EXPERTS
        own[layer, is_expert, ""] += size
        counts[is_expert] += module.elements + module.bias
        if path.endswith(".mlp.gate_up_proj") and not is_expert:
            joined = max(joined, size)
        if layer is None and model.tied_head:
            tied = max(tied, size)
    whole = max(1, own.total())
    loaded = whole if nbytes is None else nbytes
    sums = Counter({key: ceil_div(size * loaded, whole) for key, size in own.items()})
    tied, joined = (ceil_div(size * loaded, whole) for size in (tied, joined))
    largest = {name: size for name, size in ((_HEAD, tied), (_JOINED, joined)) if size}
    return _weights(sums, blocks, tied, largest, counts)


def _modules(model: Model) -> Iterator[tuple[int | None, str, Module]]:
    """Yield what is loaded, with its layer as in `Matrix` and its path."""
    blocks = len(model.layers)
    for module in filter(_is_loaded, model.modules):
        is_input = module.part is Part.EMBEDDING
        yield (None if is_input else _outside(blocks, module.part)), module.path, module
    for index, layer in enumerate(model.layers):
        for module in filter(_is_loaded, layer.modules):
            yield index, f"{model.layers_path}.{index}.{module.path}", module


def _is_loaded(module: Module) -> bool:
    return module.loaded


def _weights(
    sums: Counter[_Key],
    blocks: int,
    tied: int,
    largest: dict[str, int],
    counts: Counter[bool],
) -> Weights:
    matrices = tuple(
        Matrix(layer, routed, size, name) for (layer, routed, name), size in sums.items()
    )
    sizes: Counter[bool] = Counter()
    for matrix in matrices:
        sizes[matrix.is_expert] += matrix.nbytes
    averages = {kind: (sizes[kind], max(1, counts[kind])) for kind in (False, True)}
    return Weights(blocks, matrices, tied, largest, averages)


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
