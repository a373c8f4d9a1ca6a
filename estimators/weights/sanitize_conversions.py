"""What mlx-lm does to formats of other libraries at load: it dequantises, repacks or casts.

Source: the `sanitize` methods of mlx-lm's model classes, and utils.py, _transform_awq_weights.
"""

from collections.abc import Callable, Iterable, Iterator
from math import prod

from memfit.estimators.arch.class_row import Fp8
from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.weights.derived import FLOATING, TensorGroup


def sanitize_conversions(
    tensors: tuple[TensorGroup, ...], text_class: str
) -> tuple[TensorGroup, ...]:
    """Return the tensors as the class of a model type converts them; names change elsewhere."""
    rules = row_or_default(text_class)
    # In the order of deepseek_v3.py: integers first, then FP8.
    if rules.unpacks_integers:
        tensors = tuple(_unpacked_integers(tensors))
    if rules.fp8:
        tensors = tuple(_dequantised_fp8(tensors, rules.fp8))
    return tuple(_split_gpt_oss(tensors)) if rules.splits_mxfp4 else tensors


def repacked_awq(tensors: tuple[TensorGroup, ...]) -> Iterator[TensorGroup]:
    """Yield AWQ's tensors in MLX's layout: packed columns become packed rows, zero points
    biases, and every other floating tensor takes the type of the scales."""
    # _transform_awq_weights casts all floating tensors to the type of the last scales it read.
    scales = [tensor for tensor in tensors if tensor.name.endswith(".scales")]
    dtype = scales[-1].dtype if scales else None
    for tensor in tensors:
        rewrite = _AWQ.get(tensor.name.rpartition(".")[2])
        if rewrite:
            yield from rewrite(tensor)
        elif dtype and tensor.dtype in FLOATING:
            yield tensor.as_type(dtype)
        else:
            yield tensor


def _named(tensors: Iterable[TensorGroup]) -> dict[str, TensorGroup]:
    return {tensor.name: tensor for tensor in tensors}


def _dequantised_fp8(tensors: tuple[TensorGroup, ...], kind: Fp8) -> Iterator[TensorGroup]:
    """Weights times their scales: bfloat16, or the type of a single scale; ministral3.py, which has
    these, drops those of activations."""
    scalar = kind is Fp8.SCALAR
    names = _named(tensors)
    used = {
        f"{tensor.name}_scale_inv"
        for tensor in tensors
        if (scale := names.get(f"{tensor.name}_scale_inv")) and _is_scale_of(scale, tensor, kind)
    }
    for tensor in tensors:
        scale_name = f"{tensor.name}_scale_inv"
        if scale_name in used:
            yield tensor.as_type(names[scale_name].dtype if scalar else "BF16")
        # A scale that belongs to no weight stays: match_tensors then finds no place for it.
        elif tensor.name not in used and not (scalar and "activation_scale" in tensor.name):
            yield tensor


def _is_scale_of(scale: TensorGroup, weight: TensorGroup, kind: Fp8) -> bool:
    if kind is Fp8.SCALAR:
        return prod(scale.shape) == 1
    # Rounded up: dequant pads the last block.
    blocks = tuple(-(-extent // 128) for extent in weight.shape)
    if kind is Fp8.PADDED_BLOCKS and len(scale.shape) == len(blocks):
        return all(have >= need for have, need in zip(scale.shape, blocks, strict=True))
    return scale.shape == blocks


def _unpacked_integers(tensors: tuple[TensorGroup, ...]) -> Iterator[TensorGroup]:
    """weight_packed, weight_scale and weight_shape become weight, scales and biases."""
    names = _named(tensors)
    for tensor in tensors:
        base, _, leaf = tensor.name.rpartition("weight_")
        # The class looks for weight_shape and takes the other two by name.
        if leaf == "shape":
            packed, scale = names.get(f"{base}weight_packed"), names.get(f"{base}weight_scale")
            if packed and scale:
                # The same bytes, seen as uint32: eight integers of four bits.
                yield packed._replace(name=f"{base}weight", dtype="U32")
                yield scale._replace(name=f"{base}scales")
                # -8 * scale: the packed integers are unsigned, around 8.
                yield scale._replace(name=f"{base}biases")
        elif not tensor.name.endswith(("weight_scale", "weight_packed")):
            yield tensor


def _split_gpt_oss(tensors: tuple[TensorGroup, ...]) -> Iterator[TensorGroup]:
    """Interleaved gate and up projections are split; blocks of 16 bytes become rows of uint32."""
    # gpt_oss.py returns early: the checkpoint was written by mlx-lm.
    done = any("gate_proj.weight" in tensor.name for tensor in tensors)
    for tensor in tensors:
        name, is_bias = tensor.name, tensor.name.endswith("_proj_bias")
        if done or not ("gate_up_proj" in name or "down_proj" in name):
            yield tensor
            continue
        if name.endswith("_blocks") and len(tensor.shape) > 1:
            # Bytes are viewed as uint32, and the groups of a row become one axis.
            *rows, groups, width = tensor.shape
            tensor = tensor._replace(dtype="U32", shape=(*rows, groups * width // 4))
        name = name.replace("_blocks", ".weight").replace("_scales", ".scales")
        name = name.replace("_proj_bias", "_proj.bias") if is_bias else name
        if "gate_up_proj" in name:
            # Even rows are the gate, odd rows up.
            for half in ("gate_proj", "up_proj"):
                yield _half(tensor, name.replace("gate_up_proj", half), -1 if is_bias else -2)
        else:
            yield tensor._replace(name=name)


def _half(tensor: TensorGroup, name: str, axis: int) -> TensorGroup:
    shape = list(tensor.shape)
    if len(shape) >= -axis:
        shape[axis] //= 2
    return tensor._replace(name=name, shape=tuple(shape), nbytes=tensor.nbytes // 2)


def _repacked_weight(tensor: TensorGroup) -> Iterator[TensorGroup]:
    name = f"{tensor.name.removesuffix('qweight')}weight"
    if len(tensor.shape) == 2:
        # AutoAWQ packs eight outputs to a word, MLX eight inputs.
        inputs, outputs = tensor.shape
        yield tensor._replace(name=name, dtype="U32", shape=(8 * outputs, inputs // 8))
    else:
        yield tensor


def _transposed_scales(tensor: TensorGroup) -> Iterator[TensorGroup]:
    # mlx-lm computes them from the zero points, or from 8 where there are none.
    biases = f"{tensor.name.removesuffix('scales')}biases"
    for name in (tensor.name, biases):
        yield tensor._replace(name=name, shape=tensor.shape[::-1])


_AWQ: dict[str, Callable[[TensorGroup], Iterable[TensorGroup]]] = {
    "qweight": _repacked_weight,
    # The biases hold them.
    "qzeros": lambda _: (),
    "scales": _transposed_scales,
}
