"""What sanitize of mlx-lm's classes does to tensors: names, drops and conversions.

The rules are those of the class's row. What no rule removes or renames, the strict load refuses.

Source: the `sanitize` methods of mlx-lm's model classes, and utils.py, _transform_awq_weights.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Module, Part, linear
from memfit.estimators.arch.registry import ClassRow, Fp8, row_or_default
from memfit.estimators.base import dtypes
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.weights.derived import EXPERTS, FLOATING, TensorGroup

Modules = Mapping[str, Module]


def drop_rule(model: Model, tensors: Iterable[TensorGroup]) -> Callable[[str], bool]:
    """Return a function that says whether the model's class removes a tensor, by its name."""
    # One expression for all patterns: a checkpoint can have a hundred thousand names.
    rules = row_or_default(model.model_type)
    patterns = list(_dropped(rules, model, tensors))
    found = re.compile("|".join(patterns)).search if patterns else None
    # gemma4_text.py, sanitize: layers that share keys and values have no projections for them.
    sharing = _sharing(model)

    def is_dropped(name: str) -> bool:
        if found and found(name):
            return True
        if rules.drops_later_layers and _layer_of(name) >= len(model.layers):
            return True
        return bool(sharing) and _in_layer(name) in sharing

    return is_dropped


def _dropped(rules: ClassRow, model: Model, tensors: Iterable[TensorGroup]) -> Iterator[str]:
    if rules.drops:
        yield rules.drops
    part, pattern = rules.drops_in_layout
    if part and any(part in tensor.name for tensor in tensors):
        yield pattern
    if rules.drops_next_layer:
        yield f"{rules.drops_next_layer}{len(model.layers)}"
    if rules.drops_when_tied and model.tied_head:
        yield rules.drops_when_tied


def _sharing(model: Model) -> frozenset[str]:
    """Keys and values of the layers that have no use for their own."""
    return frozenset(
        f"{index}.self_attn.{name}"
        for index, layer in enumerate(model.layers)
        if not all(module.loaded for module in layer.modules)
        for name in ("k_proj", "v_proj", "k_norm")
    )


def _in_layer(name: str) -> str:
    """What follows `layers.`, less the last word."""
    return name.partition("layers.")[2].rpartition(".")[0]


def _layer_of(name: str) -> int:
    """The number after `model.layers.`, -1 where there is none."""
    words = name.split(".", 3)
    known = len(words) > 2 and words[1] == "layers" and words[2].isdecimal()
    # Nine digits at most: a name is hostile input, and int() of thousands of digits is slow.
    return int(words[2][:9]) if known else -1


def sanitize_names(
    tensors: Iterable[TensorGroup], model_type: str, modules: Modules
) -> tuple[TensorGroup, ...]:
    """Return the tensors under the class's names: stacked, split and renamed."""
    rules = row_or_default(model_type)
    # Renamed first: the following rules look for the class's own names.
    if renames := [(re.compile(old), new) for old, new in rules.renames]:
        tensors = (tensor._replace(name=_rename(tensor.name, renames)) for tensor in tensors)
    tensors = _stacked(_split_joined(tensors, rules, modules), rules, modules)
    result = tuple(tensors if rules.keeps_shapes else _split_latent(tensors, modules))
    return (*result, *_copied_head(result)) if rules.copies_embedding else result


def _copied_head(tensors: tuple[TensorGroup, ...]) -> Iterator[TensorGroup]:
    """Yield the embedding as a head where files have none, tied or not (minicpm.py, sanitize)."""
    named = {tensor.name: tensor for tensor in tensors}
    embedding = named.get("model.embed_tokens.weight")
    if embedding and "lm_head.weight" not in named:
        yield embedding._replace(name="lm_head.weight")


def _rename(name: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        name, count = pattern.subn(replacement, name, count=1)
        if count:
            break
    return name


def _stacked(
    tensors: Iterable[TensorGroup], rules: ClassRow, modules: Modules
) -> Iterator[TensorGroup]:
    """One tensor per expert becomes one of all experts, where the class stacks them."""
    for group in tensors:
        parent, found, place = group.name.partition(EXPERTS)
        matrix, _, leaf = place.partition(".")
        path = None
        # The leaves that classes stack; any other stays, and the strict load refuses it.
        if found and leaf in ("weight", "scales", "biases"):
            path = _first_of(
                _parents(parent, rules.stack), rules.expert_names.get(matrix, ""), modules
            )
        if path is None:
            yield group
        else:
            # mx.stack puts the experts first.
            shape = (group.copies, *group.shape)
            yield TensorGroup(f"{path}.{leaf}", group.dtype, shape, group.copies * group.nbytes)


def _parents(parent: str, *stacks: str) -> tuple[str, ...]:
    """Where the class may have what the checkpoint keeps under ``parent``."""
    # Some classes rename the block too (kimi_linear.py, sanitize).
    other = parent.replace("block_sparse_moe", "mlp").replace("shared_mlp", "mlp")
    parents = (parent,) if other == parent else (parent, other)
    return tuple(".".join(filter(None, (parent, stack))) for parent in parents for stack in stacks)


def _first_of(parents: Iterable[str], name: str, modules: Modules) -> str | None:
    paths = (f"{parent}.{name}" for parent in parents)
    return next((path for path in paths if path in modules), None)


def _split_joined(
    tensors: Iterable[TensorGroup], rules: ClassRow, modules: Modules
) -> Iterator[TensorGroup]:
    """One tensor of several matrices becomes one for each (`mx.split` in granitemoe.py)."""
    for tensor in tensors:
        paths = _paths_in(tensor.name, rules, modules)
        # Split only when the parts fill the tensor: a packed one has another number of elements.
        if paths and sum(modules[path].elements for path in paths) == prod(tensor.shape):
            for path in paths:
                nbytes = dtypes.nbytes(modules[path].elements, tensor.dtype)
                yield TensorGroup(f"{path}.weight", tensor.dtype, modules[path].shape, nbytes)
        else:
            yield tensor


def _paths_in(name: str, rules: ClassRow, modules: Modules) -> list[str]:
    for suffix, names in rules.joined:
        if name.endswith(suffix):
            # Where classes keep stacked experts; the empty name is a plain matrix (hunyuan.py).
            stacks = ("switch_mlp", "experts.switch_glu", "experts", "")
            parents = _parents(name.removesuffix(suffix), *stacks)
            return [path for one in names if (path := _first_of(parents, one, modules))]
    return []


def _split_latent(tensors: Iterable[TensorGroup], modules: Modules) -> Iterator[TensorGroup]:
    """kv_b_proj becomes a matrix per head for keys and one for values (deepseek_v3.py)."""
    for tensor in tensors:
        parent, found, leaf = tensor.name.rpartition(".kv_b_proj.")
        if not found:
            yield tensor
            continue
        # Only classes with latent attention have these two; others load kv_b_proj as it is.
        keys, values = modules.get(f"{parent}.embed_q"), modules.get(f"{parent}.unembed_out")
        if keys is None or values is None or len(tensor.shape) != 2:
            yield tensor
            continue
        heads, latent, key_dim = keys.shape
        rows, columns = tensor.shape
        # Each head has its nope keys, then its values (deepseek_v3.py, sanitize).
        if rows != heads * (key_dim + values.shape[1]) or key_dim * columns % latent:
            yield tensor
            continue
        for name, shape in (
            # Keys are transposed and packed along another axis, so packed rows have another length.
            ("embed_q", (heads, latent, key_dim * columns // latent)),
            ("unembed_out", (heads, values.shape[1], columns)),
        ):
            nbytes = dtypes.nbytes(prod(shape), tensor.dtype)
            yield TensorGroup(f"{parent}.{name}.{leaf}", tensor.dtype, shape, nbytes)


def with_own_head(model: Model, tensors: tuple[Tensor, ...] | None) -> Model:
    """Return the model with the head that the headers list, or without, whatever the config says.

    Without headers the config decides, and so it does for every other class.
    """
    path = row_or_default(model.model_type).own_head
    if not path or tensors is None:
        return model
    has_head = any(tensor.name == f"{path}.weight" for tensor in tensors)
    if has_head != model.tied_head:
        return model
    if has_head:
        head = linear(path, model.hidden_size, model.vocab_size, Part.HEAD)
        return replace(model, modules=(*model.modules, head))
    kept = tuple(module for module in model.modules if module.part is not Part.HEAD)
    return replace(model, modules=kept)


def ties_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config ties their head; the root of a wrapper decides before its section."""
    section = config.get("text_config")
    places = (config, section) if isinstance(section, Mapping) else (config,)
    said = (place["tie_word_embeddings"] for place in places if "tie_word_embeddings" in place)
    return bool(next(said, True))


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
