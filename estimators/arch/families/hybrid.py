"""Blocks that hybrid families share: grouped attention, state-space mixers, short convolutions.

Sources: mlx-lm models/jamba.py and mamba.py (Mamba), ssm.py, mamba2.py and granitemoehybrid.py
(Mamba-2), lfm2.py (short convolution). Convolution states hold ``kernel - 1`` tokens.
"""

from collections.abc import Sequence

from memfit.estimators.arch.caches import StateBuffer
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.modules import (
    Modules,
    Part,
    array,
    convolution,
    embedding,
    linear,
    norm,
)
from memfit.estimators.arch.specs import Attention, Mixer, Recurrent, Scan
from memfit.estimators.base.records import record

MixerBlock = tuple[Mixer, Modules]


def outside(
    fields: Fields,
    *,
    tied: bool,
    embedding_path: str = "model.embed_tokens",
    norm_path: str = "model.norm",
    norm_bias: bool = False,
) -> Modules:
    """Embedding, final norm and, unless tied, the head."""
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    ends = (embedding(embedding_path, vocabulary, hidden), norm(norm_path, hidden, bias=norm_bias))
    return ends if tied else (*ends, linear("lm_head", hidden, vocabulary, Part.HEAD))


def grouped_attention(
    fields: Fields, head_dim: int, *, in_cache_list: bool = False, qk_norm: bool = False
) -> Attention:
    """Attention whose heads share keys and values in groups."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads")
    fields.require_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        in_cache_list=in_cache_list,
        qk_norm=qk_norm,
    )


def derived_head_dim(fields: Fields) -> int:
    """``hidden_size / num_attention_heads``, where the class reads no ``head_dim``."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.require_multiple("hidden_size", hidden, "num_attention_heads", heads)
    fields.expect("head_dim", hidden // heads)
    return hidden // heads


def require_kinds(
    fields: Fields, key: str, kinds: Sequence[str], known: Sequence[str], needed: Sequence[str] = ()
) -> None:
    """Raise when a layer's kind is unknown, or when no layer is of a kind the class looks for."""
    for index, kind in enumerate(kinds):
        if kind not in known:
            raise fields.fail(
                f"{key}[{index}]", f"expected {' or '.join(known)}, got {kind[:40]!r}"
            )
    for kind in needed:
        if kind not in kinds:
            raise fields.fail(key, f"no layer is {kind!r}; the model class needs one")


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
    viewed = inner * state if keeps_all_states else 0
    spec = Recurrent(
        kind="mamba",
        scan=Scan.STACKED if keeps_all_states else Scan.TOKEN_LOOP,
        inner_dim=inner,
        state=(
            StateBuffer((kernel - 1) * inner, view_elements=inner),
            StateBuffer(inner * state, view_elements=viewed, survives_decode=keeps_all_states),
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


@record(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer; ``float32_decay`` where `cast_predicate` refuses A_log."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool
    input_bias: bool
    output_bias: bool
    normed: bool = True
    float32_decay: bool = False

    def block(self, hidden: int) -> MixerBlock:
        """The mixer; its state (heads, head_dim, state) is float32, as its time steps are."""
        inner = self.heads * self.head_dim
        conv = inner + 2 * self.groups * self.state
        spec = Recurrent(
            kind="mamba2",
            scan=Scan.MATRIX,
            inner_dim=inner,
            heads=self.heads,
            state=(
                StateBuffer((self.kernel - 1) * conv, view_elements=conv),
                StateBuffer(inner * self.state, float32=True),
            ),
        )
        modules = (
            linear("in_proj", hidden, inner + conv + self.heads, bias=self.input_bias),
            convolution("conv1d", conv, self.kernel, bias=self.conv_bias),
            array("dt_bias", (self.heads,)),
            array("A_log", (self.heads,), float32=self.float32_decay),
            array("D", (self.heads,)),
            linear("out_proj", inner, hidden, bias=self.output_bias),
        )
        return spec, (*modules, norm("norm", inner)) if self.normed else modules


def short_convolution(fields: Fields) -> MixerBlock:
    """A gated convolution over a few tokens (LFM2)."""
    hidden = fields.count("hidden_size")
    kernel = fields.count("conv_L_cache", least=2)
    bias = fields.flag("conv_bias", False)
    spec = Recurrent(
        kind="short_convolution",
        scan=Scan.KERNEL,
        inner_dim=3 * hidden,
        state=(StateBuffer((kernel - 1) * hidden, view_elements=hidden),),
    )
    return spec, (
        linear("in_proj", hidden, 3 * hidden, bias=bias),
        convolution("conv", hidden, kernel, bias=bias),
        linear("out_proj", hidden, hidden, bias=bias),
    )
