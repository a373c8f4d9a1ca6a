"""Whether a GGUF file has the tensors that its metadata describes.

Source: llama.cpp src/llama-model.cpp, load_tensors, which ends at a tensor that is missing or has
another shape.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.manifest import Tensor

Shapes = Mapping[str, tuple[int, ...]]

_MIXERS = ("attn_", "ssm_", "shortconv.", "time_mix_")
_FEED_FORWARD = ("ffn_", "channel_mix_")


def require_tensors(
    metadata: Mapping[str, Any], tensors: Iterable[Tensor], model: Model, trunk: int, name: str
) -> None:
    """Check the shapes of a file, and the least that each block of its trunk must have.

    Raises:
        CheckpointError: at the first tensor that is missing or has another shape.
    """
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for fault in _faults(metadata, shapes, model, trunk):
        raise CheckpointError(f"{name}: {fault}; the file is damaged or not complete")


def _faults(metadata: Mapping[str, Any], shapes: Shapes, model: Model, trunk: int) -> Iterator[str]:
    for tensor, shape in shapes.items():
        if 0 in shape:
            yield f"{printable(tensor)}: a dimension of 0 in {list(shape)}"
    embedding, hidden = shapes.get("token_embd.weight"), model.hidden_size
    if embedding and embedding[0] != hidden:
        yield f"token_embd.weight: rows of {embedding[0]}, where embedding_length is {hidden}"
    blocks = _blocks(shapes)
    widths = metadata.get(f"{model.model_type}.feed_forward_length", 0)
    for index, layer in enumerate(model.layers[:trunk]):
        width = widths[index] if isinstance(widths, list) else widths
        yield from _faults_of_block(index, blocks.get(index, {}), layer, hidden, width)


def _blocks(shapes: Shapes) -> dict[int, dict[str, tuple[int, ...]]]:
    """The shapes of each block, by what follows its number."""
    blocks: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for tensor, shape in shapes.items():
        first, _, rest = tensor.partition(".")
        number, _, place = rest.partition(".")
        if first == "blk" and number.isdecimal():
            blocks[int(number[:9])][place] = shape
    return blocks


def _faults_of_block(
    index: int, block: Shapes, layer: Layer, hidden: int, width: int
) -> Iterator[str]:
    if not block:
        yield f"blk.{index}: no tensor of it, where block_count counts it"
    if layer.mixers and not _has(block, _MIXERS):
        yield f"blk.{index}: no tensor of its attention or states"
    if width and not _has(block, _FEED_FORWARD):
        yield f"blk.{index}: no tensor of its feed-forward block"
    for place, wanted in _expected(layer, hidden):
        found = block.get(place)
        if found is not None and found != wanted:
            yield f"blk.{index}.{place}: shape {list(found)}, expected {list(wanted)}"


def _has(block: Shapes, beginnings: tuple[str, ...]) -> bool:
    return any(place.startswith(beginnings) for place in block)


def _expected(layer: Layer, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes of keys and values, by which their cache is sized."""
    for mixer in layer.mixers:
        match mixer:
            case Attention():
                yield "attn_k.weight", (hidden, mixer.kv_heads * mixer.key_dim)
                yield "attn_v.weight", (hidden, mixer.kv_heads * mixer.value_dim)
            case LatentAttention() | GatedDelta() | Recurrent() | TracedMixer():
                pass
            case _:
                assert_never(mixer)
