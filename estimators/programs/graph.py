"""A class of mlx-lm, recorded once: the graphs of its calls with sizes as expressions.

A file of `data/` has one class. What a call computes is a prologue, then a block of operations for
each layer; equal blocks are there once, whatever call or layer they are of. The last layer's block
has what follows the layers too. data/README.md describes the file.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.mlx.versions import Version, parse_version
from memfit.estimators.trace.graph_format import Role

_Schema = Literal["memfit.programs/1"]
SCHEMA: _Schema = "memfit.programs/1"

Value = bool | int | float | str | None
Fact = Value | tuple[Value, ...]
# A number, a text, or a tuple of them. An integer that depends on sizes is a text "=2*L"; other
# texts are MLX's own.
Argument = Any

LAYER = "#"
"""Stands for the layer's number in the name of a weight or of a cache's array."""


class Reference(NamedTuple):
    """An array as a block refers to it."""

    block: int
    """0 is the block itself, 1 the layer before, 2 the one before that; -1 is the prologue."""
    place: int
    """Position in the block's own arrays, or in what another block exports."""


class BlockArray(NamedTuple):
    """An array of a block: first those from before the call, then those that its nodes compute."""

    role: Role
    dtype: str
    shape: tuple[str, ...]
    """Expressions."""
    name: str = ""
    """As `trace.graph_format.Array`, with `LAYER` for the number of the layer."""


class BlockNode(NamedTuple):
    """One primitive of MLX."""

    name: str
    inputs: tuple[Reference, ...]
    outputs: tuple[int, ...]
    """Positions in the block's own arrays."""
    arguments: tuple[Argument, ...] = ()


class Block(NamedTuple):
    """The operations of the prologue or of one layer."""

    arrays: tuple[BlockArray, ...]
    nodes: tuple[BlockNode, ...]
    evaluated: tuple[Reference, ...]
    """What of the arrays passed to mx.eval is listed with this layer."""
    cached: tuple[Reference, ...]
    """The arrays that the caches of this layer hold when the call returns."""
    exports: tuple[int, ...]
    """The own arrays that other blocks refer to."""


class BlockText(Struct, frozen=True, forbid_unknown_fields=True):
    """A block as its file has it: one line for each array from before the call and each node."""

    inputs: tuple[str, ...]
    """Role, type, shape and name: ``weight BF16 hidden_size,8 model.layers.#.mlp.gate.weight``."""
    nodes: tuple[tuple[Any, ...], ...]
    """Name, references, ``type shape`` of each output, then the arguments."""
    evaluated: str = ""
    cached: str = ""
    exports: str = ""


class Structure(Struct, frozen=True, forbid_unknown_fields=True):
    """The graph of some calls of the class, at any sizes and depth."""

    when: tuple[str, ...]
    """The values of `RecordedClass.features` that its calls have, each as text of digits."""
    guards: tuple[str, ...]
    """Conditions that hold in all its recordings; the graph is known where all do."""
    prologue: int
    """Position in the blocks of the class, as those of the layers."""
    layers: Mapping[str, int]
    """Block of a layer by `layer_key`."""


class RecordedAttention(NamedTuple):
    """The sizes of a call of attention, as expressions."""

    heads: str
    kv_heads: str
    key_dim: str
    value_dim: str
    keys: str = "P + L"
    """Tokens in the cache that it reads."""
    when: str = "1"
    """A condition on the calls that have it."""
    masks: tuple[Literal["none", "causal", "array"], ...] = ("none", "causal", "array")
    """What mlx-lm may pass as its mask."""


class Variant(Struct, frozen=True, forbid_unknown_fields=True):
    """Graphs of the class as some settings build it."""

    facts: Mapping[str, tuple[Fact, ...]]
    """Values of settings of the config, packing and machine that they were recorded with."""
    structures: tuple[Structure, ...]


class RecordedClass(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The data of one class."""

    schema: _Schema
    model_type: str
    versions: Mapping[str, str]
    """The versions of MLX and mlx-lm that it was recorded with."""
    made_from: str
    """A digest of how it was recorded."""
    dims: Mapping[str, str]
    """Names of sizes and their expressions on the config."""
    layer_count: str
    """Expression on the config."""
    kinds: tuple[str, ...]
    """Expressions on the config and ``i``, the layer's number, that say of which kind it is."""
    attention: tuple[RecordedAttention, ...]
    """The calls of attention, of which MLX chooses the kernels by their sizes."""
    features: tuple[str, ...]
    """What distinguishes the graphs of calls: conditions and kernels, each with a digit."""
    settings: Mapping[str, Any]
    """Settings that the class reads, and what it takes where the config has none."""
    fixed: Mapping[str, Any]
    """Of them those that all recordings have in common: other values are not known."""
    ignored: Mapping[str, Any]
    """Of them the numbers that no graph depends on while they are positive, as recorded."""
    variants: tuple[Variant, ...]
    blocks: tuple[BlockText, ...]
    description: Any = None
    """The class's `arch.model.Model`, sizes as expressions: describing.py."""

    @property
    def mlx_lm(self) -> Version:
        """The version of mlx-lm that it was recorded with."""
        return parse_version(self.versions["mlx-lm"])

    def block(self, position: int) -> Block:
        """Return a block as arrays and nodes."""
        known = self._parsed
        if position not in known:
            known[position] = parsed(self.blocks[position])
        return known[position]

    @cached_property
    def _parsed(self) -> dict[int, Block]:
        return {}


def decoded(content: bytes) -> RecordedClass:
    """Return the class of a data file's content.

    Raises:
        UnsupportedError: when it is of another version of the format.
    """
    try:
        return msgspec.json.decode(content, type=RecordedClass)
    except msgspec.DecodeError as error:
        raise UnsupportedError(f"data of a recorded class: {error}") from None


def parsed(text: BlockText) -> Block:
    """Return the block of a text."""
    arrays = [_array(line) for line in text.inputs]
    nodes: list[BlockNode] = []
    for name, inputs, outputs, *arguments in text.nodes:
        first = len(arrays)
        arrays += [_array(f"computed {each}") for each in outputs]
        made = tuple(range(first, len(arrays)))
        plain = tuple(tuple(a) if isinstance(a, list) else a for a in arguments)
        nodes.append(BlockNode(name, references(inputs), made, plain))
    exports = tuple(map(int, text.exports.split()))
    evaluated, cached = references(text.evaluated), references(text.cached)
    return Block(tuple(arrays), tuple(nodes), evaluated, cached, exports)


def _array(line: str) -> BlockArray:
    role, dtype, shape, *name = line.split(" ", 3)
    axes = () if shape == "-" else tuple(shape.split(","))
    return BlockArray(role, dtype, axes, *name)  # type: ignore[arg-type]


def references(text: str) -> tuple[Reference, ...]:
    """Return the references of a text: own arrays by number, exports of others: ``^3``, ``1:3``.

    >>> references("4 ^0 1:7")
    (Reference(block=0, place=4), Reference(block=-1, place=0), Reference(block=1, place=7))
    """
    return tuple(map(_reference, text.split()))


def _reference(text: str) -> Reference:
    if text.startswith("^"):
        return Reference(-1, int(text[1:]))
    block, _, index = text.rpartition(":")
    return Reference(int(block or 0), int(index))


def reference_text(reference: Reference) -> str:
    """Return a reference as `references` reads it.

    >>> reference_text(Reference(-1, 3)), reference_text(Reference(0, 3))
    ('^3', '3')
    """
    block, place = reference
    if block < 0:
        return f"^{place}"
    return f"{block}:{place}" if block else str(place)


# What a layer computes can depend on its place among these many of the first and the last.
_ENDS = 2


def layer_key(kinds: tuple[str, ...], layer: int) -> str:
    """Return what decides a layer's block: its place near an end, its kind and those beside it.

    After a chunk the last layer makes no output, so that the one before it frees otherwise; what
    one layer leaves, the next one may free. Of the first of its kind other layers take masks.

    >>> [layer_key(("full",) * 6, layer) for layer in (0, 2, 3, 5)]
    ['0/ -,full,full', '/ full,full,full', '/ full,full,full', '/0 full,full,-']
    """
    count = len(kinds)
    start = str(layer) if layer < _ENDS else "first" if kinds[layer] not in kinds[:layer] else ""
    end = str(count - 1 - layer) if layer >= count - _ENDS else ""
    before = kinds[layer - 1] if layer else "-"
    after = kinds[layer + 1] if layer + 1 < count else "-"
    return f"{start}/{end} {before},{kinds[layer]},{after}"
