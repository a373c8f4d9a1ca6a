"""The mixers of a GGUF file's layers: what each keeps, in elements.

Source: llama.cpp src/llama-hparams.cpp, n_embd_k_gqa, n_embd_v_gqa, n_embd_r and n_embd_s
(commit 0c1e57098).
"""

from msgspec.structs import replace

from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.gguf.rules import Rule, State
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    Growth,
    Indexer,
    LatentAttention,
    Mixer,
    Recurrent,
    Scan,
    StateBuffer,
)

_TOKEN_SHIFTS = 2  # llama-hparams.h, token_shift_count
_KDA_KERNEL = 4  # taken where the file names none: n_embd_r


class Heads:
    """Heads and KV heads of every block; one number in the file is for all."""

    def __init__(self, fields: Fields, blocks: int, hidden: int) -> None:
        self.counts = fields.counts("attention.head_count", blocks, least=0) or [0] * blocks
        self.kv_heads = fields.counts("attention.head_count_kv", blocks, least=0) or self.counts
        self._hidden = hidden

    def usual_width(self, fields: Fields) -> int:
        """Return the width of a head where the file names none."""
        if not self.counts[0]:
            raise fields.fail("attention.head_count", "expected at least 1, got 0")
        return self._hidden // self.counts[0]


class Widths:
    """The widths of keys and values, full and sliding."""

    def __init__(self, fields: Fields, rule: Rule, heads: Heads) -> None:
        self.fields, self.rule, self.heads = fields, rule, heads
        usual = heads.usual_width(fields)
        self.key = fields.count("attention.key_length", usual)
        self.value = fields.count("attention.value_length", usual)
        self.sliding_key = fields.count("attention.key_length_swa", self.key)
        self.sliding_value = fields.count("attention.value_length_swa", self.value)

    def attention(
        self, index: int, *, window: int | None, owns_cache: bool, indexed: bool, query_rows: int
    ) -> Mixer:
        """Return a layer's attention; ``query_rows`` of its matrix tell whether it has a gate."""
        if self._is_latent():
            return self._latent(index, indexed=indexed)
        full = Attention(
            heads=self.heads.counts[index],
            kv_heads=self.heads.kv_heads[index],
            key_dim=self.key if window is None else self.sliding_key,
            value_dim=self.value if window is None else self.sliding_value,
            owns_cache=owns_cache,
            fused=self.rule.flash_attention,
            output_gate=query_rows == 2 * self.heads.counts[index] * self.key > 0,
        )
        if window is None:
            return full
        chunked = self.rule.sliding is not None and self.rule.sliding.chunked
        growth = Growth.CHUNKED if chunked else Growth.ROTATING
        return replace(full, window=window, growth=growth)

    def _is_latent(self) -> bool:
        if not self.rule.latent:
            return False
        keys = ("attention.key_length_mla", "attention.value_length_mla")
        lengths = [self.fields.count(key, 0, least=0) for key in keys]
        if any(lengths) and not all(lengths):
            raise self.fields.fail(keys[lengths.index(0)], "missing; the other MLA length is there")
        return all(lengths)

    def _latent(self, index: int, *, indexed: bool) -> LatentAttention:
        if self.heads.kv_heads[index] != 1:
            raise self.fields.fail(
                "attention.head_count_kv", "expected 1: all heads share the latent"
            )
        latent = self.fields.count("attention.kv_lora_rank", most=self.key)
        indexer = None
        if indexed:
            indexer = Indexer(
                heads=self.fields.count("attention.indexer.head_count"),
                dim=self.fields.count("attention.indexer.key_length"),
                top_k=self.fields.count("attention.indexer.top_k"),
            )
        return LatentAttention(
            heads=self.heads.counts[index],
            latent_dim=latent,
            rope_dim=self.key - latent,
            nope_dim=max(0, self.fields.count("attention.key_length_mla") + latent - self.key),
            value_dim=self.fields.count("attention.value_length_mla"),
            indexer=indexer,
        )


def state_of(state: State, fields: Fields, heads: Heads, hidden: int) -> Mixer:
    """Return the recurrent mixer of a layer, by the keys that size its states."""
    if state is State.WKV:
        return _wkv(fields, hidden)
    if state is State.SHORT_CONVOLUTION:
        kernel = fields.count("shortconv.l_cache")
        return _recurrent("short_convolution", hidden, hidden * (kernel - 1), 0)
    if state is State.KDA:
        return _kda(fields, heads)
    if state is State.LINEAR:
        width = fields.count("attention.key_length", heads.usual_width(fields))
        size = width * width * heads.counts[0]
        return _recurrent("linear_attention", heads.counts[0] * width, 0, size)
    if state is State.GATED_DELTA:
        return _gated_delta(fields)
    return _ssm(fields, grouped=state is State.GROUPED_SSM)


def _recurrent(kind: str, inner: int, shifted: int, kept: int) -> Recurrent:
    """The two states llama.cpp allocates, of which either may be empty."""
    states = tuple(StateBuffer(size, float32=True) for size in (shifted, kept) if size)
    return Recurrent(kind=kind, scan=Scan.KERNEL, inner_dim=inner, state=states)


def _wkv(fields: Fields, hidden: int) -> Recurrent:
    shifts = fields.count("token_shift_count", _TOKEN_SHIFTS, least=0)
    return _recurrent("rwkv", hidden, shifts * hidden, hidden * fields.count("wkv.head_size"))


def _kda(fields: Fields, heads: Heads) -> Mixer:
    width, count = fields.count("kda.head_dim"), heads.counts[0]
    return GatedDelta(
        key_heads=count,
        value_heads=count,
        key_dim=width,
        value_dim=width,
        kernel=fields.count("ssm.conv_kernel", _KDA_KERNEL, least=0) or _KDA_KERNEL,
    )


def _ssm(fields: Fields, *, grouped: bool) -> Recurrent:
    inner, size = fields.count("ssm.inner_size"), fields.count("ssm.state_size")
    groups = fields.count("ssm.group_count", least=0) if grouped else 0
    kernel = fields.count("ssm.conv_kernel")
    channels = inner + 2 * groups * size
    return _recurrent("mamba", inner, (kernel - 1) * channels, size * inner)


def _gated_delta(fields: Fields) -> GatedDelta:
    inner, value_heads = fields.count("ssm.inner_size"), fields.count("ssm.time_step_rank")
    fields.require_multiple("ssm.inner_size", inner, "ssm.time_step_rank", value_heads)
    return GatedDelta(
        key_heads=fields.count("ssm.group_count"),
        value_heads=value_heads,
        key_dim=fields.count("ssm.state_size"),
        value_dim=inner // value_heads,
        kernel=fields.count("ssm.conv_kernel"),
    )
