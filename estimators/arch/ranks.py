"""The part of a model that one rank has, by the ``shard`` and ``pipeline`` of its class.

A tensor-parallel rank has a part of each layer, a rank of a pipeline some of the layers. What no
rule names, every rank has whole: embeddings, norms, routers and mostly the output head.
"""

from msgspec.structs import replace

from memfit.estimators.arch.model import Layer, Model, Module
from memfit.estimators.arch.registry import Cut, Cuts, class_row
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


def chosen_parallel(model_type: str, parallel: Parallel | None) -> Parallel:
    """Return how mlx-lm's sharded_load runs a described class; ``parallel`` is what is asked for.

    Raises:
        UnsupportedError: when the class has no such method.
    """
    row, can = class_row(model_type), list[Parallel]()
    if row and row.tensor is not None:
        can.append("tensor")
    if row and row.pipeline:
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
        cuts = _cuts(model)
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


def _cuts(model: Model) -> Cuts:
    row = class_row(model.model_type)
    assert row is not None
    assert row.tensor is not None, "chosen_parallel refuses other classes"
    return row.tensor


def cut_of(model: Model, path: str) -> Cut | None:
    """Return where ``shard`` divides a module with a full path, None where every rank has it."""
    rules = _cuts(model)
    if path in rules:
        return rules[path]
    layer = path.removeprefix(f"{model.layers_path}.")
    return None if layer == path else rules.get(layer.partition(".")[2])


def _shard_layer(layer: Layer, rules: Cuts, size: int) -> Layer:
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


def _shard(module: Module, rules: Cuts, size: int, kv_heads: int | None) -> Module:
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
