"""Falcon-H1: Mamba-2 and attention side by side in every layer.

Source: mlx-lm models/falcon_h1.py.
"""

from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model, norm, under
from memfit.estimators.arch.registry import Irregular

# mlx-lm ModelArgs: what the class takes for keys the config lacks.
_DEFAULTS = {
    "head_dim": 64,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "vocab_size": 32784,
    "tie_word_embeddings": True,
}


def _build(fields: Fields) -> Model:
    fields.ignore(
        "mamba_chunk_size",
        "mamba_expand",
        "mamba_norm_before_gate",
        "mamba_use_mlp",
        "mlp_expansion_factor",
        "mlp_multipliers",
        "ssm_multipliers",
    )
    hidden = fields.count("hidden_size")
    mamba, mamba_modules = _mamba(fields)
    attention_spec, attention_modules = _attention(fields, hidden)
    intermediate = fields.count("intermediate_size")
    feed_forward, mlp = blocks.dense_mlp(
        hidden, intermediate, bias=fields.flag("mlp_bias", False), path="feed_forward"
    )
    layer = Layer(
        (mamba, attention_spec),
        feed_forward,
        (
            *mamba_modules,
            *attention_modules,
            *mlp,
            norm("input_layernorm", hidden),
            norm("pre_ff_layernorm", hidden),
        ),
        mixer_paths=("mamba.", "self_attn."),
    )
    tied = fields.flag("tie_word_embeddings", False)
    return blocks.decoder(
        fields,
        (layer,) * fields.layers(),
        blocks.ends(fields, tied=tied, norm_path="model.final_layernorm"),
        makes_own_cache=True,
    )


def _attention(fields: Fields, hidden: int) -> blocks.MixerBlock:
    """Attention with its cache in the state's CacheList, so that it is never quantised."""
    spec = replace(blocks.grouped_attention(fields, fields.count("head_dim")), in_cache_list=True)
    bias = fields.flag("attention_bias", False)
    return spec, under("self_attn", blocks.attention(hidden, spec, bias=bias))


def _mamba(fields: Fields) -> blocks.MixerBlock:
    inner = fields.count("mamba_n_heads") * fields.count("mamba_d_head")
    if fields.count("mamba_d_ssm") != inner:
        raise fields.fail("mamba_d_ssm", f"is not mamba_n_heads * mamba_d_head, {inner}")
    spec, modules = blocks.mamba2(
        fields,
        conv_bias=fields.flag("mamba_conv_bias", False),
        input_bias=fields.flag("mamba_proj_bias", False),
        output_bias=fields.flag("projectors_bias", False),
        normed=fields.flag("mamba_rms_norm", False),
    )
    return spec, under("mamba", modules)


CLASSES = {"falcon_h1": Irregular(builder=_build, defaults=_DEFAULTS, since=(0, 28, 1))}
