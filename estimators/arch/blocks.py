"""Blocks that families share: attention, experts, recurrences and the ends of a model.

Sources: mlx-lm models/jamba.py and mamba.py (Mamba), ssm.py, mamba2.py and granitemoehybrid.py
(Mamba-2), lfm2.py (short convolution). Convolution states hold ``kernel - 1`` tokens.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import (
    ROUTER_8BIT,
    Layer,
    Model,
    Module,
    Modules,
    Part,
    array,
    convolution,
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
    Mixer,
    MixtureOfExperts,
    Recurrent,
    Scan,
    StateBuffer,
)

MixerBlock = tuple[Mixer, Modules]
FeedForwardBlock = tuple[FeedForward, Modules]


def derived_head_dim(fields: Fields, *, given: str = "head_dim") -> int:
    """Return hidden_size / heads, where the class reads no key; ``given`` must not contradict."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.require_multiple("hidden_size", hidden, "num_attention_heads", heads)
    fields.expect(given, hidden // heads)
    return hidden // heads


def grouped_attention(
    fields: Fields,
    head_dim: int,
    *,
    heads_key: str = "num_attention_heads",
    kv_heads_key: str = "num_key_value_heads",
    kv_optional: bool = False,
    qk_norm: bool = False,
) -> Attention:
    """Return full attention; absent KV heads are as many as heads if ``kv_optional``."""
    heads = fields.count(heads_key)
    kv_heads = fields.count(kv_heads_key, heads if kv_optional else None)
    fields.require_multiple(heads_key, heads, kv_heads_key, kv_heads)
    return Attention(
        heads=heads, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim, qk_norm=qk_norm
    )


def attention(
    hidden: int,
    spec: Attention,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    output: str = "o_proj",
    norms: tuple[str, str] = ("q_norm", "k_norm"),
) -> Modules:
    """Parameters of grouped attention; the output has the same bias unless one is given."""
    queries, keys = spec.heads * spec.key_dim, spec.kv_heads * spec.key_dim
    values, outputs = spec.kv_heads * spec.value_dim, spec.heads * spec.value_dim
    modules: Modules = (
        linear("q_proj", hidden, 2 * queries if spec.output_gate else queries, bias=bias),
        linear("k_proj", hidden, keys, bias=bias),
        linear("v_proj", hidden, values, bias=bias),
        linear(output, outputs, hidden, bias=bias if output_bias is None else output_bias),
    )
    if not spec.qk_norm:
        return modules
    return (*modules, *(norm(name, spec.key_dim) for name in norms))


def mixture(
    fields: Fields,
    experts_key: str,
    top_k_key: str = "num_experts_per_tok",
    *,
    width: int,
    shared_width: int = 0,
    float32_scores: bool = False,
) -> MixtureOfExperts:
    """Return the experts of a layer; choosing more than there are is an error, as at run time."""
    experts, top_k = fields.count(experts_key), fields.count(top_k_key)
    if top_k > experts:
        raise fields.fail(top_k_key, f"{top_k} is more than {experts_key} {experts}")
    return MixtureOfExperts(
        experts=experts,
        top_k=top_k,
        intermediate=width,
        shared_intermediate=shared_width,
        float32_scores=float32_scores,
    )


def expert_modules(
    spec: MixtureOfExperts,
    hidden: int,
    router: Modules,
    *,
    stack: str = "switch_mlp",
    shared: str = "shared_experts",
    bias: bool = False,
    routed_bias: bool | None = None,
) -> Modules:
    """Parameters of a sparse block: its router, stacked experts and the shared ones if any.

    Routed experts have the same bias as the shared ones unless one is given.
    """
    routed_bias = bias if routed_bias is None else routed_bias
    experts = switch_glu(hidden, spec.intermediate, spec.experts, bias=routed_bias)
    modules = (*router, *under(stack, experts))
    if not spec.shared_intermediate:
        return modules
    part = Part.SHARED_EXPERTS
    return modules + under(
        shared, gated_mlp(hidden, spec.shared_intermediate, bias=bias, part=part)
    )


def router_8bit(path: str, hidden: int, experts: int) -> Modules:
    """A router that the class's ``quant_predicate`` keeps at 8 bits."""
    return (linear(path, hidden, experts, Part.ROUTER, predicate=ROUTER_8BIT),)


def corrected_router(hidden: int, experts: int) -> Modules:
    """DeepSeek-V3's router: an unquantised matrix and a float32 correction of its scores."""
    return (
        array("gate", (experts, hidden), Part.ROUTER),
        array("gate.e_score_correction_bias", (experts,), Part.ROUTER, float32=True),
    )


def dense_mlp(
    hidden: int, intermediate: int, *, bias: bool = False, path: str = "mlp"
) -> FeedForwardBlock:
    modules = under(path, gated_mlp(hidden, intermediate, bias=bias))
    return DenseMLP(intermediate=intermediate), modules


def decoder_layer(
    mixer: MixerBlock,
    feed_forward: FeedForwardBlock,
    hidden: int,
    *,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    norm_bias: bool = False,
) -> Layer:
    """A layer with a norm before its mixer and one before its feed-forward block."""
    modules = tuple(norm(name, hidden, bias=norm_bias) for name in norms)
    return Layer((mixer[0],), feed_forward[0], mixer[1] + feed_forward[1] + modules)


def ends(
    fields: Fields,
    *,
    tied: bool = False,
    bias: bool = False,
    embedding_path: str = "model.embed_tokens",
    norm_path: str = "model.norm",
    norm_bias: bool = False,
) -> Modules:
    """Embedding, last norm and, unless tied, the head; ``bias`` is of norm and head."""
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    modules: Modules = (
        embedding(embedding_path, vocabulary, hidden),
        norm(norm_path, hidden, bias=bias or norm_bias),
    )
    if tied:
        return modules
    return (*modules, linear("lm_head", hidden, vocabulary, Part.HEAD, bias=bias))


def decoder(
    fields: Fields,
    layers: Iterable[Layer],
    modules: Modules,
    *,
    layers_path: str = "model.layers",
    makes_own_cache: bool = False,
    kv_quantizable: bool = True,
) -> Model:
    """Return the model of layers and what is outside them."""
    return Model(
        hidden_size=fields.count("hidden_size"),
        vocab_size=fields.count("vocab_size"),
        layers=tuple(layers),
        modules=modules,
        layers_path=layers_path,
        makes_own_cache=makes_own_cache,
        kv_quantizable=kv_quantizable,
    )


def at_8_bits(modules: Iterable[Module], endings: tuple[str, ...]) -> Modules:
    """Mark what the class's ``quant_predicate`` keeps at 8 bits, by the ends of the paths."""
    return tuple(
        replace(module, predicate=ROUTER_8BIT) if module.path.endswith(endings) else module
        for module in modules
    )


def mamba(
    hidden: int,
    inner: int,
    state: int,
    kernel: int,
    rank: int,
    *,
    conv_bias: bool,
    bias: bool,
    keeps_all_states: bool = False,
) -> MixerBlock:
    """Mamba: its scan state (inner, state) has the activations' type.

    With ``keeps_all_states`` it is a slice of the states of all tokens in the chunk.
    """
    view_elements = inner * state if keeps_all_states else 0
    spec = Recurrent(
        kind="mamba",
        scan=Scan.STACKED if keeps_all_states else Scan.TOKEN_LOOP,
        inner_dim=inner,
        kernel=kernel,
        state=(
            StateBuffer((kernel - 1) * inner, view_elements=inner),
            StateBuffer(
                inner * state, view_elements=view_elements, survives_decode=keeps_all_states
            ),
        ),
    )
    return spec, (
        linear("in_proj", hidden, 2 * inner, bias=bias),
        convolution("conv1d", inner, kernel, bias=conv_bias),
        linear("x_proj", inner, rank + 2 * state),
        linear("dt_proj", rank, inner, bias=True),
        array("A_log", (inner, state)),
        array("D", (inner,)),
        linear("out_proj", inner, hidden, bias=bias),
    )


def mamba2(
    fields: Fields,
    *,
    heads_key: str = "mamba_n_heads",
    head_dim_key: str = "mamba_d_head",
    groups_key: str = "mamba_n_groups",
    state_key: str = "mamba_d_state",
    kernel_key: str = "mamba_d_conv",
    conv_bias: bool,
    input_bias: bool,
    output_bias: bool,
    normed: bool = True,
    float32_decay: bool = False,
) -> MixerBlock:
    """Mamba-2; its state (heads, head_dim, state) is float32, as its time steps are.

    ``float32_decay`` is for classes with a ``cast_predicate`` that excludes A_log.
    """
    hidden, heads, groups = (fields.count(key) for key in ("hidden_size", heads_key, groups_key))
    fields.require_multiple(heads_key, heads, groups_key, groups)
    state, kernel = fields.count(state_key), fields.count(kernel_key, least=2)
    inner = heads * fields.count(head_dim_key)
    conv = inner + 2 * groups * state
    spec = Recurrent(
        kind="mamba2",
        scan=Scan.MATRIX,
        inner_dim=inner,
        kernel=kernel,
        heads=heads,
        groups=groups,
        normed=normed,
        state=(
            StateBuffer((kernel - 1) * conv, view_elements=conv),
            StateBuffer(inner * state, float32=True),
        ),
    )
    modules = (
        linear("in_proj", hidden, inner + conv + heads, bias=input_bias),
        convolution("conv1d", conv, kernel, bias=conv_bias),
        array("dt_bias", (heads,)),
        array("A_log", (heads,), float32=float32_decay),
        array("D", (heads,)),
        linear("out_proj", inner, hidden, bias=output_bias),
    )
    return spec, (*modules, norm("norm", inner)) if normed else modules


def short_convolution(fields: Fields) -> MixerBlock:
    """A gated convolution over a few tokens (LFM2)."""
    hidden = fields.count("hidden_size")
    kernel = fields.count("conv_L_cache", least=2)
    bias = fields.flag("conv_bias", False)
    spec = Recurrent(
        kind="short_convolution",
        scan=Scan.CONVOLUTION,
        inner_dim=3 * hidden,
        kernel=kernel,
        state=(StateBuffer((kernel - 1) * hidden, view_elements=hidden),),
    )
    return spec, (
        linear("in_proj", hidden, 3 * hidden, bias=bias),
        convolution("conv", hidden, kernel, bias=bias),
        linear("out_proj", hidden, hidden, bias=bias),
    )
