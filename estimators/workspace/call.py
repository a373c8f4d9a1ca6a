"""One call of the model: how many tokens, on what, and what is in the caches."""

from msgspec import Struct

from memfit.estimators.arch.specs import KVBuffer
from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.kernels import (
    AttentionCall,
    FusedRule,
    Mask,
    SplitProducts,
    VectorAttention,
    fused_kernel,
)
from memfit.estimators.mlx.kv_cache import KVFormat
from memfit.estimators.mlx.versions import MlxVersions


class BackendTraits(Struct, frozen=True):
    """What decides which kernels MLX has."""

    backend: Backend
    versions: MlxVersions
    nax: bool
    """Whether the GPU has neural accelerators."""
    splits: SplitProducts = SplitProducts()
    """Which products are summed from parts."""
    vector_attention: VectorAttention = VectorAttention()
    """Which attention of few queries is in two passes."""

    @property
    def compiled_copies(self) -> bool:
        """Whether compiled functions write over none of their inputs."""
        return self.versions.has("compiled_copies")

    @property
    def joins_fused_heads(self) -> bool:
        """Whether the heads of fused attention are copied to be joined.

        cuDNN's result has the layout of the queries, which rope wrote head by head (cuda/rope.cu).
        """
        return self.backend == "cuda" and not self.versions.has("cuda_rope_in_place")


class Occupancy(Struct, frozen=True):
    """A buffer around one call, in tokens."""

    before: int
    """Capacity before the call."""
    after: int
    """Capacity after it."""
    keys: int
    """Keys that are attended to."""
    kv: KVFormat
    """How the buffer stores its elements."""
    is_copied: bool = False
    """Whether the call first copies the buffer: the first step of a batch."""
    is_stored: bool = False
    """Whether the buffer before the call is that of a stored cache, which stays as it is."""

    @property
    def is_first_chunk(self) -> bool:
        """Whether the first chunk itself becomes the buffer: no slot is left to write it into.

        MLX returns the update that covers all of an array (mlx ops.cpp, slice_update), and
        RotatingKVCache keeps the first chunk as it is.
        """
        return not self.before and self.after == self.keys and self.kv.bits is None


class CallShape(Struct, frozen=True):
    """One call of the model on ``tokens`` tokens of ``batch`` sequences."""

    tokens: int
    """Of each sequence: those of a chunk, or one."""
    batch: int
    width: int
    """Bytes of an activation."""
    target: BackendTraits
    """The backend that runs the call."""
    occupancy: dict[KVBuffer, Occupancy]
    """Of each distinct buffer."""
    previous: int
    """Tokens of the chunk before, which a state may be a slice of."""
    is_batched: bool = False
    """Whether caches are those of the batch generator, which mask the padding of each sequence."""
    copies_states: bool = False
    """Whether the call first copies the states: the first step of a batch."""
    has_states: bool = True
    """Whether a call before it has made the states."""

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.tokens * self.batch

    def fused(
        self,
        *,
        keys: int,
        key_dim: int,
        value_dim: int,
        heads: int,
        kv_heads: int,
        array_mask: bool,
        quantised: bool,
    ) -> FusedRule | None:
        """Return the fused kernel of attention, None where all scores are held."""
        if quantised:
            return None
        # A chunk without an array passes the word "causal" (mlx-lm base.py).
        mask: Mask = "array" if array_mask else "causal" if self.tokens > 1 else "none"
        return fused_kernel(
            AttentionCall(
                backend=self.target.backend,
                nax=self.target.nax,
                query_tokens=self.tokens,
                key_tokens=keys,
                key_dim=key_dim,
                value_dim=value_dim,
                heads=heads,
                kv_heads=kv_heads,
                mask=mask,
                batch=self.batch,
            ),
            self.target.versions.mlx,
        )
