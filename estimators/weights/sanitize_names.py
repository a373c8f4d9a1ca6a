"""Names and shapes of the Hub's layout, changed to those of the model class.

Source: the `sanitize` methods of mlx-lm's model classes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from memfit.estimators.arch.modules import Module
from memfit.estimators.base import dtypes
from memfit.estimators.weights.tensor_groups import EXPERTS, TensorGroup

Modules = Mapping[str, Module]

_NESTED = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^(?!language_model\.)", "language_model."),
)
# The first pattern that is found is replaced.
_RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "bailing_moe": ((r"\.mlp\.gate\.(?=weight$|bias$)", ".mlp.gate.gate_proj."),),
    "gemma4": _NESTED[:1],
    "gemma4_unified": _NESTED[:1],
    "glm4v": _NESTED,
    "glm4v_moe": _NESTED,
    "glm_ocr": _NESTED,
    # An original GPT-2 has no prefix (gpt2.py, sanitize).
    "gpt2": ((r"^(?!model\.)", "model."),),
    "gpt_neox": (
        (r"^gpt_neox\.layers\.", "model.h."),
        (r"^gpt_neox\.", "model."),
        (r"^(?!model\.)", "model."),
    ),
    "kimi_linear": (
        (r"\.(?=[qkv]_conv1d\.weight$)([qkv])_conv1d\.", r".\1_conv.conv."),
        (r"\.block_sparse_moe\.gate\.e_score", ".mlp.e_score"),
        (r"\.block_sparse_moe\.(?!experts\.)", ".mlp."),
    ),
    # w1, w2 and w3 are Mixtral's names for gate, down and up.
    "lfm2_moe": (
        (r"\.w1\.weight$", ".gate_proj.weight"),
        (r"\.w2\.weight$", ".down_proj.weight"),
        (r"\.w3\.weight$", ".up_proj.weight"),
    ),
    "llava": _NESTED,
    "mistral3": _NESTED,
    "qwen2_5_vl": _NESTED,
    "qwen2_vl": _NESTED,
    "qwen3_5": _NESTED,
    "qwen3_5_moe": _NESTED,
    "qwen3_vl": _NESTED,
    "qwen3_vl_moe": _NESTED,
    "step3p5": (
        (r"\.moe\.(?=(gate|up|down)_proj\.)", ".mlp.switch_mlp."),
        (r"\.moe\.gate\.", ".mlp.gate.gate."),
        (r"\.moe\.router_bias", ".mlp.gate.router_bias"),
        # step3p5.py replaces only where the new name is not there already.
        (r"(?<!\.mlp)\.share_expert\.", ".mlp.share_expert."),
    ),
}


def sanitize_names(
    tensors: Iterable[TensorGroup], model_type: str, modules: Modules
) -> tuple[TensorGroup, ...]:
    """Return the tensors under the class's names: stacked, split and renamed."""
    # Renamed first: the following rules look for the class's own names.
    if rules := [(re.compile(old), new) for old, new in _RENAMES.get(model_type, ())]:
        tensors = (tensor._replace(name=_rename(tensor.name, rules)) for tensor in tensors)
    tensors = _stacked(_split_joined(tensors, model_type, modules), model_type, modules)
    result = tuple(_split_latent(tensors, modules))
    return (*result, *_copied_head(result)) if model_type == "minicpm" else result


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


# How a class names the experts' matrices when it stacks them, where the checkpoint has other names.
_W = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_SAME = {name: name for name in _W.values()}
# Experts of these checkpoints are one tensor already.
_NOT_STACKED: dict[str, str] = {}
_EXPERT_NAMES: dict[str, dict[str, str]] = {
    "granitemoe": _NOT_STACKED,
    "granitemoehybrid": _NOT_STACKED,
    "kimi_linear": _W,
    "minimax": _W,
    "minimax_m2": _W,
    "mixtral": _W,
    # SwitchMLP's names (mlx-lm switch_layers.py): two matrices without a gate.
    "nemotron_h": {"up_proj": "fc1", "down_proj": "fc2"},
    "phimoe": _W,
    "qwen3_5_moe": _NOT_STACKED,
    "qwen3_vl_moe": _NOT_STACKED,
    "step3p5": _NOT_STACKED,
}


def _stacked(
    tensors: Iterable[TensorGroup], model_type: str, modules: Modules
) -> Iterator[TensorGroup]:
    """One tensor per expert becomes one of all experts, where the class stacks them."""
    names = _EXPERT_NAMES.get(model_type, _SAME)
    for group in tensors:
        parent, found, place = group.name.partition(EXPERTS)
        matrix, _, leaf = place.partition(".")
        path = None
        # The leaves that classes stack; any other stays, and the strict load refuses it.
        if found and leaf in ("weight", "scales", "biases"):
            path = _first_of(_parents(parent, "switch_mlp"), names.get(matrix, ""), modules)
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


_GATE_UP = (
    (".experts.gate_up_proj", ("gate_proj", "up_proj")),
    (".experts.down_proj", ("down_proj",)),
)
_INPUT_OUTPUT = (
    (".input_linear.weight", ("gate_proj", "up_proj")),
    (".output_linear.weight", ("down_proj",)),
)
# hunyuan.py zips the two halves with up_proj first.
_HUNYUAN = (
    (".qkv_proj.weight", ("q_proj", "k_proj", "v_proj")),
    (".gate_and_up_proj.weight", ("up_proj", "gate_proj")),
)
# Matrices that are one tensor in the checkpoint and several in the class, by the end of its name.
_JOINED: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "gemma4": _GATE_UP,
    "gemma4_text": _GATE_UP,
    "gemma4_unified": _GATE_UP,
    "granitemoe": _INPUT_OUTPUT,
    "granitemoehybrid": _INPUT_OUTPUT,
    "hunyuan": _HUNYUAN,
    "llama4": _GATE_UP,
    "qwen3_5_moe": _GATE_UP,
    "qwen3_vl_moe": _GATE_UP,
}


def _split_joined(
    tensors: Iterable[TensorGroup], model_type: str, modules: Modules
) -> Iterator[TensorGroup]:
    """One tensor of several matrices becomes one for each (`mx.split` in granitemoe.py)."""
    joined = _JOINED.get(model_type, ())
    for tensor in tensors:
        paths = _paths_in(tensor.name, joined, modules)
        # Split only when the parts fill the tensor: a packed one has another number of elements.
        if paths and sum(modules[path].elements for path in paths) == prod(tensor.shape):
            for path in paths:
                nbytes = dtypes.nbytes(modules[path].elements, tensor.dtype)
                yield TensorGroup(f"{path}.weight", tensor.dtype, modules[path].shape, nbytes)
        else:
            yield tensor


def _paths_in(
    name: str, joined: tuple[tuple[str, tuple[str, ...]], ...], modules: Modules
) -> list[str]:
    for suffix, names in joined:
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
