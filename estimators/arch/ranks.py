"""The part of a model that one rank has, by the ``shard`` and ``pipeline`` of its class.

A tensor-parallel rank has a part of each layer, a rank of a pipeline some of the layers. What no
rule names, every rank has whole: embeddings, norms, routers and mostly the output head.
"""

from collections.abc import Mapping
from enum import Enum

from msgspec.structs import replace

from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import Module
from memfit.estimators.arch.specs import (
    Attention,
    DenseMLP,
    FeedForward,
    GatedDelta,
    LatentAttention,
    Mixer,
    MixtureOfExperts,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.ranks import Parallel, Rank, pick_parallel
from memfit.estimators.base.setting_names import setting


class Cut(Enum):
    """Where a matrix is divided. Source: mlx nn/layers/distributed.py."""

    OUTPUTS = "all-to-sharded"  # its rows, and its bias
    INPUTS = "sharded-to-all"  # its columns; every rank has the whole bias
    FIRST = "first axis"  # heads or channels, cut by the class itself
    SLICE = "a slice"  # heads, without a copy: the whole array stays in memory
    KV_HEADS = "kv heads"  # rows, repeated where there are fewer heads than ranks (qwen3_5.py)


Rules = Mapping[str, Cut]


def _projections(path: str) -> dict[str, Cut]:
    return {
        f"{path}.gate_proj": Cut.OUTPUTS,
        f"{path}.up_proj": Cut.OUTPUTS,
        f"{path}.down_proj": Cut.INPUTS,
    }


_HEADS: Rules = {
    **{f"self_attn.{name}_proj": Cut.OUTPUTS for name in "qkv"},
    "self_attn.o_proj": Cut.INPUTS,
}
_LATENT: Rules = {
    "self_attn.q_proj": Cut.OUTPUTS,
    "self_attn.q_b_proj": Cut.OUTPUTS,
    "self_attn.embed_q": Cut.SLICE,
    "self_attn.unembed_out": Cut.SLICE,
    "self_attn.o_proj": Cut.INPUTS,
}
_MLP: Rules = _projections("mlp")
_EXPERTS: Rules = _projections("mlp.switch_mlp")
_SHARED: Rules = _projections("mlp.shared_experts")
_DELTA: Rules = {
    **{f"linear_attn.in_proj_{name}": Cut.OUTPUTS for name in ("qkv", "z", "b", "a")},
    **{f"linear_attn.{name}": Cut.FIRST for name in ("conv1d", "dt_bias", "A_log")},
    "linear_attn.out_proj": Cut.INPUTS,
}
_DEEPSEEK: Rules = {**_LATENT, **_MLP, **_EXPERTS, **_SHARED}
_GLM4_MOE: Rules = {**_HEADS, **_MLP, **_EXPERTS, **_SHARED}
_MINIMAX: Rules = {
    **_HEADS,
    **_projections("block_sparse_moe.switch_mlp"),
    "self_attn.q_norm": Cut.FIRST,
    "self_attn.k_norm": Cut.FIRST,
}
_QWEN3_5: Rules = {
    **_HEADS,
    "self_attn.k_proj": Cut.KV_HEADS,
    "self_attn.v_proj": Cut.KV_HEADS,
    **_DELTA,
    **_MLP,
    **_EXPERTS,
    **_projections("mlp.shared_expert"),
    "language_model.lm_head": Cut.OUTPUTS,
}
# What the ``shard`` of the class cuts, by paths in a layer: mlx-lm models/<class>.py.
TENSOR: Mapping[str, Rules] = {
    "deepseek_v2": {**_DEEPSEEK, "self_attn.kv_b_proj": Cut.OUTPUTS},  # deepseek_v2.py
    "deepseek_v3": _DEEPSEEK,  # deepseek_v3.py
    "deepseek_v32": _DEEPSEEK,  # deepseek_v32.py
    "glm4_moe": _GLM4_MOE,  # glm4_moe.py
    "glm_moe_dsa": _DEEPSEEK,  # glm_moe_dsa.py has the class of deepseek_v32.py
    "gpt_oss": {  # gpt_oss.py
        **_HEADS,
        **_projections("mlp.experts"),
        "self_attn.sinks": Cut.SLICE,
    },
    "iquestcoder": {**_HEADS, **_MLP},  # llama.py
    "joyai_llm_flash": _DEEPSEEK,  # deepseek_v3.py
    "kimi_k2": _DEEPSEEK,  # deepseek_v3.py
    "llama": {**_HEADS, **_MLP},  # llama.py
    "minimax": _MINIMAX,  # minimax.py
    "minimax_m2": _MINIMAX,  # minimax.py
    "ministral3": {**_HEADS, **_MLP},  # ministral3.py
    "mistral": {**_HEADS, **_MLP},  # llama.py
    "qwen2": {**_HEADS, **_MLP},  # qwen2.py
    "qwen3": {**_HEADS, **_MLP},  # qwen3.py
    "qwen3_5": _QWEN3_5,  # qwen3_5.py
    "qwen3_5_moe": _QWEN3_5,  # qwen3_5_moe.py has the class of qwen3_5.py
    "qwen3_moe": {**_HEADS, **_MLP, **_EXPERTS},  # qwen3_moe.py
    "solar_open": _GLM4_MOE,  # solar_open.py has the class of glm4_moe.py
    "step3p5": {  # step3p5.py
        **_HEADS,
        "self_attn.g_proj": Cut.OUTPUTS,
        **_MLP,
        **_EXPERTS,
        **_projections("mlp.share_expert"),
    },
    "xverse": {**_HEADS, **_MLP},  # llama.py
}
# Classes with a ``model`` that has a ``pipeline``, as mlx-lm's sharded_load looks for it.
PIPELINE = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa"),
        *("joyai_llm_flash", "kimi_k2", "ministral3", "qwen2", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_moe", "qwen3_next", "solar_open"),
    }
)


def chosen_parallel(model_type: str, parallel: Parallel | None) -> Parallel:
    """Return how mlx-lm's sharded_load runs a described class; ``parallel`` is what is asked for.

    Raises:
        UnsupportedError: when the class has no such method.
    """
    can: list[Parallel] = []
    if model_type in TENSOR:
        can.append("tensor")
    if model_type in PIPELINE:
        can.append("pipeline")
    try:
        return pick_parallel(parallel, can)
    except UnsupportedError as error:
        raise UnsupportedError(f"{model_type}: {error}") from None


def share_of(model: Model, rank: Rank) -> Model:
    """Return what a rank has of a described model.

    Raises:
        InputError: when there are more ranks than layers.
        UnsupportedError: when its heads or matrices do not divide among the ranks.
    """
    try:
        return _share(model, rank)
    except UnsupportedError as error:
        raise UnsupportedError(f"{model.model_type}: {error}") from None


def _share(model: Model, rank: Rank) -> Model:
    if rank.parallel == "tensor":
        cuts = TENSOR[model.model_type]
        return replace(
            model,
            layers=tuple(_shard_layer(layer, cuts, rank.size) for layer in model.layers),
            modules=tuple(_shard(module, cuts, rank.size, None) for module in model.modules),
        )
    count = len(model.layers)
    if rank.size > count:
        raise InputError(
            f"{setting('ranks')} {rank.size}: the model has {count} layers, one rank needs one"
        )
    start, end = rank.layers(count)
    return replace(model, layers=model.layers[start:end], first_layer=start)


def cut_of(model: Model, path: str) -> Cut | None:
    """Return where ``shard`` divides a module with a full path, None where every rank has it."""
    rules = TENSOR[model.model_type]
    if path in rules:
        return rules[path]
    layer = path.removeprefix(f"{model.layers_path}.")
    return None if layer == path else rules.get(layer.partition(".")[2])


def _shard_layer(layer: Layer, rules: Rules, size: int) -> Layer:
    experts, needs_shared = layer.experts, "mlp.shared_experts.gate_proj" in rules
    if experts and needs_shared and not experts.shared_intermediate:
        raise UnsupportedError(
            "mlx-lm's shard of this class needs mlp.shared_experts, and the model has none"
        )
    buffers = (buffer for mixer in layer.mixers for buffer in mixer.kv_buffers())
    kv_heads = next((buffer.heads for buffer in buffers), None)
    repeats = any(cut is Cut.KV_HEADS for cut in rules.values())
    return replace(
        layer,
        mixers=tuple(_shard_mixer(mixer, size, repeats=repeats) for mixer in layer.mixers),
        feed_forward=_shard_feed_forward(layer.feed_forward, size),
        modules=tuple(_shard(module, rules, size, kv_heads) for module in layer.modules),
    )


def _shard(module: Module, rules: Rules, size: int, kv_heads: int | None) -> Module:
    cut = rules.get(module.path)
    if cut is None:
        return module
    axis = cut_axis(cut, len(module.shape))
    shape = list(module.shape)
    # Repeated heads: as many rows as one rank of as many ranks as heads has.
    parts = min(size, kv_heads) if cut is Cut.KV_HEADS and kv_heads else size
    shape[axis] = divided(shape[axis], parts, module.path)
    bias = module.bias if cut is Cut.INPUTS else module.bias // parts
    return replace(module, shape=tuple(shape), bias=bias)


def cut_axis(cut: Cut, dimensions: int) -> int:
    """Return the axis of a weight that a cut divides (mlx nn/layers/distributed.py, _shard_fn).

    >>> cut_axis(Cut.OUTPUTS, 2), cut_axis(Cut.OUTPUTS, 3), cut_axis(Cut.INPUTS, 2)
    (0, 1, 1)
    """
    if cut is Cut.INPUTS:
        return dimensions - 1
    return 0 if cut in (Cut.FIRST, Cut.SLICE) else max(dimensions - 2, 0)


def _shard_mixer(mixer: Mixer, size: int, *, repeats: bool) -> Mixer:
    match mixer:
        case Attention():
            kv_heads = min(size, mixer.kv_heads) if repeats else size
            return replace(
                mixer,
                heads=divided(mixer.heads, size, "attention heads"),
                kv_heads=divided(mixer.kv_heads, kv_heads, "heads of keys and values"),
            )
        case LatentAttention():
            return replace(mixer, heads=divided(mixer.heads, size, "attention heads"))
        case GatedDelta():
            return replace(
                mixer,
                key_heads=divided(mixer.key_heads, size, "heads of keys"),
                value_heads=divided(mixer.value_heads, size, "heads of values"),
            )
        case Recurrent() | TracedMixer():
            return mixer
        case _:
            assert_never(mixer)


def _shard_feed_forward(block: FeedForward | None, size: int) -> FeedForward | None:
    match block:
        case DenseMLP():
            return replace(block, intermediate=divided(block.intermediate, size, "intermediate"))
        case MixtureOfExperts():
            return replace(
                block,
                intermediate=divided(block.intermediate, size, "intermediate size of experts"),
                shared_intermediate=divided(
                    block.shared_intermediate, size, "intermediate size of shared experts"
                ),
            )
        case None:
            return None
        case _:
            assert_never(block)


def divided(count: int, size: int, what: str) -> int:
    """Return the part of each of ``size`` ranks.

    Raises:
        UnsupportedError: when it has a remainder.
    """
    if count % size:
        raise UnsupportedError(
            f"{what}: {count} do not divide among {size} ranks; take another number of ranks"
        )
    return count // size
