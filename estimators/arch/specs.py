"""The parts of a layer as specs: attention, feed-forward, recurrent state and caches.

What a kind does is a field here, set by the family; nothing else reads it from module names.
Code that treats the kinds differently uses ``match`` and ends with `assert_never`, so that mypy
lists every place where a new kind must be handled.

The classes of caches are those of mlx-lm models/cache.py; how much room a buffer has after some
tokens is in mlx/kv_cache.py.
"""

from enum import Enum
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

STEP = 256
"""Tokens by which every cache of mlx-lm grows (models/cache.py, ``step``)."""


class Growth(Enum):
    """How a buffer grows with tokens."""

    STEPS = "steps"  # KVCache: in steps, without a limit
    ROTATING = "rotating"  # RotatingKVCache: up to a window
    CHUNKED = "chunked"  # ChunkedKVCache: trimmed to a chunk before each call
    ROWS = "rows"  # deepseek_v41.py, LayerCache: as many rows as are needed
    DOUBLING = "doubling"  # mlx-vlm hy_v4/cache.py, HyV4KVCache: twice the room for a chunk
    PROMPT = "prompt"  # mlx-vlm glm5_next/language.py: in steps, chunks of a prompt up to a limit

    @property
    def merges(self) -> bool:
        """Whether mlx-lm's batch generator takes such caches (generate.py, _merge_caches)."""
        return self in (Growth.STEPS, Growth.ROTATING)


class KVBuffer(Struct, frozen=True):
    """Keys and values of one layer: (batch, heads, tokens, key_dim + value_dim)."""

    heads: int
    key_dim: int
    value_dim: int
    growth: Growth = Growth.STEPS
    limit: int | None = None
    """The window or chunk in tokens; None when the buffer grows without a limit."""
    in_cache_list: bool = False
    """Whether it is inside a CacheList, which mlx-lm never quantises."""
    row_tokens: int = 1
    """Tokens that share a row; a row is complete with the last of them."""

    @property
    def elements_per_token(self) -> int:
        """Elements of one row, which is one token of one sequence in all kinds but ROWS."""
        return self.heads * (self.key_dim + self.value_dim)

    def held_tokens(self, tokens: int) -> int:
        """Return the rows still needed after ``tokens`` have passed."""
        rows = tokens // self.row_tokens
        return rows if self.limit is None else min(rows, self.limit)


class StateBuffer(Struct, frozen=True):
    """A recurrent or convolution state; its size does not depend on tokens."""

    elements: int
    """Of one sequence."""
    float32: bool = False
    """Whether it is float32 for any type of the activations."""
    view_elements: int = 0
    """Elements per token of the array that the state is a slice of, and so keeps alive."""
    survives_decode: bool = False
    """Whether that array stays alive when single tokens follow a chunk."""


class Attention(Struct, frozen=True, kw_only=True):
    """Attention over keys and values of heads (MHA, GQA, MQA)."""

    heads: int
    kv_heads: int
    key_dim: int
    """Width of a head's keys and queries."""
    value_dim: int
    window: int | None = None
    """Tokens it attends to, None: all."""
    growth: Growth = Growth.STEPS
    """How its buffer grows; with a window and STEPS mlx-lm masks, but keeps every token."""
    owns_cache: bool = True
    """False for a layer that reads another layer's cache."""
    in_cache_list: bool = False
    """Whether its cache shares a CacheList with another mixer's (Falcon-H1)."""
    qk_norm: bool = False
    """Whether queries and keys are normalised."""
    value_norm: bool = False
    """Whether values are normalised too (Gemma 3n and 4)."""
    output_gate: bool = False
    """Whether the query projection is doubled, for a gate of the output (Qwen3-Next)."""
    head_gate: bool = False
    """Whether the first projection is a gate of each head's output (Step 3.5)."""
    sinks: bool = False
    """Whether a learned sink joins the softmax (gpt-oss)."""
    fused: bool = True
    """False where the class multiplies the scores out itself (Gemma 2)."""
    float32: bool = False
    """Whether it attends in float32 (Phi)."""

    @property
    def kind(self) -> str:
        """The name of the layer kind."""
        if self.growth is Growth.CHUNKED:
            return "chunked_attention"
        return "full_attention" if self.window is None else "sliding_attention"

    def sliding(self, window: int) -> "Attention":
        """Return attention of the same shape over the last ``window`` tokens."""
        return replace(self, window=window, growth=Growth.ROTATING)

    def kv_buffers(self) -> tuple[KVBuffer, ...]:
        """Return the buffers it attends over."""
        limit = None if self.growth is Growth.STEPS else self.window
        return (
            KVBuffer(
                self.kv_heads,
                self.key_dim,
                self.value_dim,
                self.growth,
                limit,
                in_cache_list=self.in_cache_list,
            ),
        )

    def states(self) -> tuple[StateBuffer, ...]:
        """Return its recurrent states: none."""
        return ()


class Indexer(Struct, frozen=True, kw_only=True):
    """What picks the tokens that sparse attention reads (DSA); it has a key cache of its own."""

    heads: int
    dim: int
    top_k: int
    """Tokens it picks."""


class LatentAttention(Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: one latent and one rope key per token for all heads."""

    owns_cache: ClassVar[bool] = True
    window: ClassVar[int | None] = None
    heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    low_rank_queries: bool = False
    """Whether queries come from a compressed input."""
    caches_expanded: bool = False
    """Whether mlx-lm keeps keys and values of every head instead of the latent."""
    indexer: Indexer | None = None

    @property
    def kind(self) -> str:
        """The name of the layer kind."""
        return "sparse_attention" if self.indexer else "latent_attention"

    def kv_buffers(self) -> tuple[KVBuffer, ...]:
        """Return the buffer of the latent, and the indexer's if it has one."""
        if self.caches_expanded:
            return (KVBuffer(self.heads, self.nope_dim + self.rope_dim, self.value_dim),)
        if self.indexer is None:
            return (KVBuffer(1, self.latent_dim, self.rope_dim),)
        # The indexer needs keys only, but mlx-lm stores them as values too (zeroed).
        return (
            KVBuffer(1, self.latent_dim, self.rope_dim, in_cache_list=True),
            KVBuffer(1, self.indexer.dim, self.indexer.dim, in_cache_list=True),
        )

    def states(self) -> tuple[StateBuffer, ...]:
        """Return its recurrent states: none."""
        return ()


class GatedDelta(Struct, frozen=True, kw_only=True):
    """Gated delta net: a convolution state, and a matrix per value head."""

    kind: ClassVar[str] = "gated_delta"
    owns_cache: ClassVar[bool] = True
    window: ClassVar[int | None] = None
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    float32: bool = True
    """Whether the matrix is float32 for any type of the activations."""

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def kv_buffers(self) -> tuple[KVBuffer, ...]:
        """Return its buffers of keys and values: none."""
        return ()

    def states(self) -> tuple[StateBuffer, ...]:
        """Return the states mlx-lm keeps for this layer."""
        return (
            StateBuffer((self.kernel - 1) * self.conv_dim),
            StateBuffer(self.value_heads * self.value_dim * self.key_dim, float32=self.float32),
        )


class Scan(Enum):
    """How a recurrence goes over the tokens of a chunk."""

    KERNEL = "kernel"  # one operation
    CONVOLUTION = "convolution"  # none: a convolution is all (mlx-lm lfm2.py)
    TOKEN_LOOP = "token_loop"  # a Python loop (mlx-lm mamba.py)
    STACKED = "stacked"  # a loop that keeps the states of all tokens (mlx-lm jamba.py)
    RG_LRU = "rg_lru"  # a loop that writes into the outputs of all tokens (recurrent_gemma.py)
    WKV = "wkv"  # a kernel of Metal, or a loop (mlx-lm rwkv7.py)
    MATRIX = "matrix"  # Mamba-2's matrix form, in chunks (mlx-lm ssm.py, ssm_attn)


class Recurrent(Struct, frozen=True, kw_only=True):
    """Any other recurrence: Mamba, linear attention, RG-LRU, RWKV, short convolution."""

    owns_cache: ClassVar[bool] = True
    window: ClassVar[int | None] = None
    kind: str
    """The name of the layer kind."""
    scan: Scan
    inner_dim: int
    """The width of its activations in prefill."""
    kernel: int = 0
    """Tokens under its convolution, 0: it has none."""
    heads: int = 0
    """Heads of Scan.MATRIX."""
    groups: int = 0
    """Heads with inputs and outputs of their own there; the others share them."""
    normed: bool = False
    """Whether its gated output is normalised."""
    state: tuple[StateBuffer, ...]

    def kv_buffers(self) -> tuple[KVBuffer, ...]:
        """Return its buffers of keys and values: none."""
        return ()

    def states(self) -> tuple[StateBuffer, ...]:
        """Return the states mlx-lm keeps for this layer."""
        return self.state


class TracedMixer(Struct, frozen=True, kw_only=True):
    """A mixer of which only its cache in mlx-lm is known; its operations are the trace's."""

    owns_cache: ClassVar[bool] = True
    buffer: KVBuffer | None = None
    state: tuple[StateBuffer, ...] = ()

    @property
    def kind(self) -> str:
        """The name of the layer kind, by what its cache keeps."""
        if self.buffer is None:
            return "recurrent_state"
        if self.buffer.growth is Growth.CHUNKED:
            return "chunked_attention"
        return "full_attention" if self.window is None else "sliding_attention"

    @property
    def window(self) -> int | None:
        """Tokens that its cache keeps, None: all."""
        return self.buffer.limit if self.buffer else None

    def kv_buffers(self) -> tuple[KVBuffer, ...]:
        """Return the buffer that its cache is."""
        return (self.buffer,) if self.buffer else ()

    def states(self) -> tuple[StateBuffer, ...]:
        """Return the states that its cache holds."""
        return self.state


Mixer = Attention | LatentAttention | GatedDelta | Recurrent | TracedMixer


class DenseMLP(Struct, frozen=True, kw_only=True):
    """A dense feed-forward block."""

    intermediate: int
    gated: bool = True
    """Whether it has two input projections."""
    activation_arrays: int = 0
    """Those between the kernels of its activation: gelu_approx is deeper than MLX compiles to one
    kernel (mlx/compile.cpp, max_compile_depth)."""
    token_shift: bool = False
    """Whether each token is mixed with the one before, which a cache keeps (RWKV)."""


class MixtureOfExperts(Struct, frozen=True, kw_only=True):
    """Routed experts, and shared ones if any."""

    experts: int
    top_k: int
    intermediate: int
    """The width of one routed expert."""
    shared_intermediate: int = 0
    """The width of all shared experts together."""
    gated: bool = True
    activation_arrays: int = 0
    """As `DenseMLP.activation_arrays`."""
    own_norms: bool = False
    """Whether router, routed and shared experts each have a norm of their own (Gemma 4)."""
    latent_dim: int | None = None
    """The width of the experts' inputs where it is not the model's (Nemotron-H)."""
    float32_scores: bool = False
    """Whether outputs are weighted in float32, by scores that stay float32."""
    weighted_inputs: bool = False
    """Whether experts get weighted inputs, and their outputs are not summed (Llama 4)."""
    float32_router: bool = False
    """Whether the router's product is in float32, of casts (MiniMax)."""


FeedForward = DenseMLP | MixtureOfExperts
