"""Nemotron-H: one mixer or one feed-forward block per layer, by a pattern of letters.

Source: mlx-lm models/nemotron_h.py.
"""

from collections.abc import Callable

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import MAX_LAYERS, Fields
from memfit.estimators.arch.model import (
    Layer,
    Model,
    Modules,
    Part,
    linear,
    norm,
    switch_linear,
    under,
)
from memfit.estimators.arch.registry import Irregular
from memfit.estimators.arch.specs import DenseMLP, FeedForward, Mixer

_LETTERS = {
    "full_attention": "*",
    "attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "conv": "M",
    "moe": "E",
    "mlp": "-",
}
_IGNORED = (
    # Of blocks that the pattern may lack.
    "intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "mlp_bias",
    # Read by other runtimes, or without an effect on sizes.
    "topk_group",
    "expand",
    "chunk_size",
    "time_step_rank",
    "use_bias",
    "n_group",
    "attention_head_dim",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
    "use_mamba_kernels",
)

_Block = tuple[tuple[Mixer, ...], FeedForward | None, Modules]


def _build(fields: Fields) -> Model:
    fields.ignore(*_IGNORED)
    hidden = fields.count("hidden_size")
    pattern = _pattern(fields)
    layers = {
        letter: _layer(_BLOCKS[letter](fields, hidden), hidden) for letter in sorted(set(pattern))
    }
    modules = blocks.ends(fields, embedding_path="backbone.embeddings", norm_path="backbone.norm_f")
    return blocks.decoder(
        fields,
        (layers[letter] for letter in pattern),
        modules,
        layers_path="backbone.layers",
        makes_own_cache=True,
    )


def _layer(block: _Block, hidden: int) -> Layer:
    mixers, feed_forward, modules = block
    return Layer(mixers, feed_forward, (*under("mixer", modules), norm("norm", hidden)))


def _pattern(fields: Fields) -> list[str]:
    """A letter for each layer, in a text or list, or spelled out under two other keys.

    The class runs only where both attention and Mamba layers are among them.
    """
    spelled = [key for key in ("layers_block_type", "layer_types") if fields.has(key)]
    key = "hybrid_override_pattern"
    if fields.has(key) or not spelled:
        letters = fields.chars(key)
    else:
        key = spelled[0]
        letters = [_LETTERS.get(kind, kind) for kind in fields.texts(key) or ()]
    fields.ignore("layers_block_type", "layer_types")
    count = fields.count("num_hidden_layers", len(letters), most=MAX_LAYERS)
    if len(letters) != count:
        raise fields.fail(key, f"expected {count} entries, one per layer, got {len(letters)}")
    fields.require_kinds(key, letters, tuple(_BLOCKS), ("M", "*"))
    return letters


def _attention(fields: Fields, hidden: int) -> _Block:
    head_dim = fields.optional_count("head_dim") or blocks.derived_head_dim(fields)
    spec = blocks.grouped_attention(fields, head_dim)
    bias = fields.required_flag("attention_bias")
    return (spec,), None, blocks.attention(hidden, spec, bias=bias)


def _mamba(fields: Fields, hidden: int) -> _Block:
    bias = fields.required_flag("mamba_proj_bias")
    spec, modules = blocks.mamba2(
        fields,
        heads_key="mamba_num_heads",
        head_dim_key="mamba_head_dim",
        groups_key="n_groups",
        state_key="ssm_state_size",
        kernel_key="conv_kernel",
        conv_bias=fields.required_flag("use_conv_bias"),
        input_bias=bias,
        output_bias=bias,
        float32_decay=True,
    )
    return (spec,), None, modules


def _dense(fields: Fields, hidden: int) -> _Block:
    intermediate = fields.count("intermediate_size")
    spec = DenseMLP(intermediate=intermediate, gated=False)
    return (), spec, _up_down(fields, hidden, intermediate, Part.MLP)


def _experts(fields: Fields, hidden: int) -> _Block:
    """Experts without a gate, in a latent space if configured, with a shared one."""
    width, latent = fields.count("moe_intermediate_size"), fields.optional_count("moe_latent_size")
    shared = _shared_width(fields)
    spec = blocks.mixture(
        fields, "n_routed_experts", width=width, shared_width=shared, float32_scores=True
    )
    spec, experts = replace(spec, gated=False, latent_dim=latent), spec.experts
    modules: Modules = (
        *blocks.corrected_router(hidden, experts),
        switch_linear("switch_mlp.fc1", experts, latent or hidden, width),
        switch_linear("switch_mlp.fc2", experts, width, latent or hidden),
    )
    if shared:
        shared_modules = _up_down(fields, hidden, shared, Part.SHARED_EXPERTS)
        modules += under("shared_experts", shared_modules)
    if latent:
        bias = fields.required_flag("mlp_bias")
        modules += (
            linear("fc1_latent_proj", hidden, latent, Part.MLP, bias=bias),
            linear("fc2_latent_proj", latent, hidden, Part.MLP, bias=bias),
        )
    return (), spec, modules


def _shared_width(fields: Fields) -> int:
    """Any number of shared experts, even 0, is one block; without the key there is none."""
    if not fields.has("n_shared_experts"):
        return 0
    width = fields.count("moe_shared_expert_intermediate_size", 0, least=0)
    return width or fields.count("intermediate_size")


def _up_down(fields: Fields, hidden: int, intermediate: int, part: Part) -> Modules:
    bias = fields.required_flag("mlp_bias")
    return (
        linear("up_proj", hidden, intermediate, part, bias=bias),
        linear("down_proj", intermediate, hidden, part, bias=bias),
    )


_BLOCKS: dict[str, Callable[[Fields, int], _Block]] = {
    "*": _attention,
    "M": _mamba,
    "-": _dense,
    "E": _experts,
}


CLASSES = {
    "nemotron_h": Irregular(
        builder=_build,
        # SwitchMLP's names (mlx-lm switch_layers.py): two matrices without a gate.
        drops=r"^mtp\.",
        expert_names={"up_proj": "fc1", "down_proj": "fc2"},
        since=(0, 27, 1),
    )
}
