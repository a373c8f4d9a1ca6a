"""One frozen class a layer kind; each knows what it keeps between tokens."""

from typing import ClassVar

from memfit.estimators.arch.caches import Cache, Growth, KVBuffer, StateBuffer
from memfit.estimators.base.records import record


@record(frozen=True, slots=True, kw_only=True)
class Attention:
    """Full attention (MHA, GQA, MQA); keys and values may differ in width.

    ``owns_cache`` is False for a layer that reads another layer's cache.
    ``sinks`` says that a learned sink joins the softmax (gpt-oss); ``listed`` that its cache
    shares a CacheList with another mixer's (Falcon-H1). ``fused`` is False where the class
    multiplies the scores out itself (Gemma 2); with ``float32`` it attends in float32 (Phi).
    """

    kind: ClassVar[str] = "full_attention"
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    owns_cache: bool = True
    sinks: bool = False
    listed: bool = False
    fused: bool = True
    float32: bool = False

    def caches(self) -> tuple[Cache, ...]:
        """Return the buffers mlx-lm gives this layer."""
        if not self.owns_cache:
            return ()
        return (KVBuffer(self.kv_heads, self.key_dim, self.value_dim, listed=self.listed),)

    def windowed(self, window: int) -> "SlidingAttention":
        """Return attention of the same shape over the last ``window`` tokens."""
        return SlidingAttention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            owns_cache=self.owns_cache,
            sinks=self.sinks,
            fused=self.fused,
            float32=self.float32,
            window=window,
        )


@record(frozen=True, slots=True, kw_only=True)
class SlidingAttention(Attention):
    """Attention over the last ``window`` tokens, in a rotating buffer.

    ``rotating`` is False where mlx-lm masks the window but keeps every token.
    """

    kind: ClassVar[str] = "sliding_attention"
    window: int
    rotating: bool = True

    def caches(self) -> tuple[Cache, ...]:
        """Return the buffers mlx-lm gives this layer."""
        if not self.owns_cache:
            return ()
        growth = Growth.ROTATING if self.rotating else Growth.STEPS
        limit = self.window if self.rotating else None
        return (KVBuffer(self.kv_heads, self.key_dim, self.value_dim, growth, limit),)


@record(frozen=True, slots=True, kw_only=True)
class ChunkedAttention(Attention):
    """Attention inside chunks of ``chunk`` tokens (Llama 4)."""

    kind: ClassVar[str] = "chunked_attention"
    chunk: int

    def caches(self) -> tuple[Cache, ...]:
        """Return the buffers mlx-lm gives this layer."""
        return (KVBuffer(self.kv_heads, self.key_dim, self.value_dim, Growth.CHUNKED, self.chunk),)


@record(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: one latent and one rope key a token for all heads.

    ``caches_expanded`` is True where mlx-lm keeps keys and values of every head instead.
    """

    kind: ClassVar[str] = "latent_attention"
    heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    caches_expanded: bool = False

    def caches(self) -> tuple[Cache, ...]:
        """Return the buffers mlx-lm gives this layer."""
        if self.caches_expanded:
            return (KVBuffer(self.heads, self.nope_dim + self.rope_dim, self.value_dim),)
        return (KVBuffer(1, self.latent_dim, self.rope_dim),)


@record(frozen=True, slots=True, kw_only=True)
class SparseLatentAttention(LatentAttention):
    """Latent attention over the tokens an indexer picks (DSA), with the indexer's key cache."""

    kind: ClassVar[str] = "sparse_attention"
    index_heads: int
    index_dim: int
    index_top_k: int

    def caches(self) -> tuple[Cache, ...]:
        """Return the latent's buffer and the indexer's."""
        # The indexer needs keys only, but mlx-lm stores them as values too (zeroed).
        return (
            KVBuffer(1, self.latent_dim, self.rope_dim, listed=True),
            KVBuffer(1, self.index_dim, self.index_dim, listed=True),
        )


@record(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Gated delta net: a convolution state and a float32 matrix a value head."""

    kind: ClassVar[str] = "gated_delta"
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def caches(self) -> tuple[Cache, ...]:
        """Return the buffers mlx-lm gives this layer."""
        return (
            StateBuffer((self.kernel - 1) * self.conv_dim),
            StateBuffer(self.value_heads * self.value_dim * self.key_dim, float32=True),
        )


@record(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """Any other recurrence: Mamba, linear attention, RG-LRU, RWKV, short convolution.

    ``inner_dim`` is the width its activations take in prefill; ``state`` its buffers.
    """

    kind: str
    inner_dim: int
    state: tuple[StateBuffer, ...]

    def caches(self) -> tuple[Cache, ...]:
        """Return the buffers mlx-lm gives this layer."""
        return self.state


Mixer = Attention | LatentAttention | GatedDelta | Recurrent


@record(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """A dense feed-forward block; ``gated`` ones have two input projections."""

    intermediate: int
    gated: bool = True


@record(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Routed experts of width ``intermediate``, shared ones of ``shared_intermediate`` in all.

    ``latent_dim`` is the width of the experts' inputs where it is not the model's (Nemotron-H).
    ``float32_weights`` where outputs are weighted in float32 by a router without a correction.
    """

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0
    gated: bool = True
    latent_dim: int | None = None
    float32_weights: bool = False


FeedForward = DenseMLP | MixtureOfExperts
