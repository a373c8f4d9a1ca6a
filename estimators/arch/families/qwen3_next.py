"""Qwen3-Next: gated delta nets with a gated full attention every few layers, over experts.

Source: mlx-lm models/qwen3_next.py.
"""

from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.modules import (
    ROUTER_8BIT,
    Module,
    Modules,
    Part,
    array,
    embedding,
    gated_mlp,
    linear,
    norm,
    switch_glu,
    under,
)
from memfit.estimators.arch.specs import (
    Attention,
    DenseMLP,
    FeedForward,
    GatedDelta,
    MixtureOfExperts,
)


def build(fields: Fields) -> Model:
    """Return the model of a ``qwen3_next`` config."""
    hidden = fields.count("hidden_size")
    count = fields.layers()
    vocabulary = fields.count("vocab_size")
    interval = fields.count("full_attention_interval", 4)
    linear_mixer, full_mixer = delta_spec(fields), attention_spec(fields)
    dense_layers = set(fields.counts("mlp_only_layers", least=0) or ())
    sparse_step = fields.count("decoder_sparse_step")
    experts = fields.count("num_experts", least=0)
    sparse, dense = experts_block(fields, hidden, experts), dense_block(fields, hidden)
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    mixers = {
        True: (linear_mixer, under("linear_attn", delta_modules(linear_mixer, hidden))),
        False: (full_mixer, under("self_attn", attention_modules(fields, full_mixer, hidden))),
    }
    layers = []
    for index in range(count):
        mixer, mixer_modules = mixers[(index + 1) % interval != 0]
        is_sparse = index not in dense_layers and experts > 0 and (index + 1) % sparse_step == 0
        feed_forward, feed_modules = sparse if is_sparse else dense
        layers.append(Layer((mixer,), feed_forward, mixer_modules + feed_modules + norms))
    outside: tuple[Module, ...] = (
        embedding("model.embed_tokens", vocabulary, hidden),
        norm("model.norm", hidden),
    )
    if not fields.flag("tie_word_embeddings", False):
        outside += (linear("lm_head", hidden, vocabulary, Part.HEAD),)
    return Model(
        model_type="qwen3_next",
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=tuple(layers),
        modules=outside,
        makes_own_cache=True,
    )


def attention_spec(fields: Fields) -> Attention:
    """The full-attention layers; the doubled query projection holds the output gate."""
    head_dim = fields.count("head_dim")
    return Attention(
        heads=fields.count("num_attention_heads"),
        kv_heads=fields.count("num_key_value_heads"),
        key_dim=head_dim,
        value_dim=head_dim,
    )


def attention_modules(fields: Fields, spec: Attention, hidden: int) -> Modules:
    """Parameters of a gated full-attention layer."""
    bias = fields.flag("attention_bias", False)
    queries, keys = spec.heads * spec.key_dim, spec.kv_heads * spec.key_dim
    return (
        linear("q_proj", hidden, 2 * queries, bias=bias),
        linear("k_proj", hidden, keys, bias=bias),
        linear("v_proj", hidden, keys, bias=bias),
        linear("o_proj", queries, hidden, bias=bias),
        norm("q_norm", spec.key_dim),
        norm("k_norm", spec.key_dim),
    )


def delta_spec(fields: Fields) -> GatedDelta:
    """The gated delta net layers."""
    spec = GatedDelta(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        kernel=fields.count("linear_conv_kernel_dim"),
    )
    if spec.value_heads % spec.key_heads:
        raise fields.fail(
            "linear_num_value_heads",
            f"{spec.value_heads} is not a multiple of linear_num_key_heads {spec.key_heads}",
        )
    return spec


def delta_modules(spec: GatedDelta, hidden: int) -> Modules:
    """Parameters of a gated delta net with its projections fused."""
    values = spec.value_heads * spec.value_dim
    return (
        linear("in_proj_qkvz", hidden, spec.conv_dim + values),
        linear("in_proj_ba", hidden, 2 * spec.value_heads),
        linear("out_proj", values, hidden),
        array("conv1d", (spec.conv_dim, spec.kernel, 1)),
        array("dt_bias", (spec.value_heads,)),
        array("A_log", (spec.value_heads,)),
        norm("norm", spec.value_dim),
    )


def experts_block(fields: Fields, hidden: int, experts: int) -> tuple[FeedForward, Modules]:
    """Routed experts with one gated shared expert."""
    intermediate = fields.count("moe_intermediate_size", least=0)
    shared = fields.count("shared_expert_intermediate_size", least=0)
    spec = MixtureOfExperts(
        experts=experts,
        top_k=fields.count("num_experts_per_tok", least=0),
        intermediate=intermediate,
        shared_intermediate=shared,
    )
    router = linear("mlp.gate", hidden, experts, Part.ROUTER, predicate=ROUTER_8BIT)
    gate = linear("mlp.shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS, predicate=ROUTER_8BIT)
    shared_modules = gated_mlp(hidden, shared, part=Part.SHARED_EXPERTS)
    return spec, (
        router,
        *under("mlp.switch_mlp", switch_glu(hidden, intermediate, experts)),
        *under("mlp.shared_expert", shared_modules),
        gate,
    )


def dense_block(fields: Fields, hidden: int) -> tuple[FeedForward, Modules]:
    """The dense MLP of layers without experts."""
    intermediate = fields.count("intermediate_size")
    return DenseMLP(intermediate=intermediate), under("mlp", gated_mlp(hidden, intermediate))
