"""One call of the model: how many tokens, on what, and what is in the caches."""

from memfit.estimators.arch.caches import STEP, Growth, KVBuffer
from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.cache_growth import capacity_at, grown
from memfit.estimators.mlx.call_plan import PlannedCall
from memfit.estimators.mlx.kernels import is_fused


@record(frozen=True, slots=True)
class BackendTraits:
    """What decides which kernels run and how far ahead MLX allocates."""

    backend: Backend
    mlx_version: tuple[int, ...]
    nax: bool


@record(frozen=True, slots=True)
class KVFormat:
    """How keys and values are held: ``bits`` None means at activation width."""

    width: int
    bits: int | None = None
    group_size: int = 64

    def nbytes(self, elements: int) -> int:
        """Return the bytes of so many elements, scales and biases included."""
        if self.bits is None:
            return elements * self.width
        return elements * self.bits // 8 + elements // self.group_size * 2 * self.width


@record(frozen=True, slots=True)
class Occupancy:
    """A buffer around one call: capacity before and after in tokens, and the keys attended to."""

    before: int
    after: int
    keys: int
    kv: KVFormat


@record(frozen=True, slots=True)
class CallShape:
    """One call of the model on ``tokens`` tokens of ``batch`` sequences.

    ``occupancy`` gives each distinct buffer's; ``width`` is the bytes of an activation.
    """

    tokens: int
    batch: int
    width: int
    target: BackendTraits
    occupancy: dict[KVBuffer, Occupancy]
    previous: int  # tokens of the chunk before, which a state may be a slice of

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
    ) -> bool:
        """Whether attention holds no scores."""
        return is_fused(
            backend=self.target.backend,
            mlx_version=self.target.mlx_version,
            nax=self.target.nax,
            query_tokens=self.tokens,
            key_tokens=keys,
            key_dim=key_dim,
            value_dim=value_dim,
            heads=heads,
            kv_heads=kv_heads,
            causal=self.tokens > 1 and not array_mask,
            array_mask=array_mask,
            kv_quantised=quantised,
        )


def prefill_occupancy(
    buffer: KVBuffer, workload: Workload, call: PlannedCall, kv: KVFormat
) -> Occupancy:
    """Return a buffer's capacity around a chunk."""
    end = call.position + call.tokens
    before = capacity_at(buffer, workload, call.position)
    after = grown(buffer, before, call.position, call.tokens)
    visible = end
    if buffer.growth is Growth.ROTATING:
        visible = after
    elif buffer.limit is not None:
        visible = min(call.position, buffer.limit) + call.tokens
    return Occupancy(before, after, visible, kv)


def decode_occupancy(buffer: KVBuffer, workload: Workload, kv: KVFormat) -> Occupancy:
    """Return a buffer's capacity around the largest decode step: the last one that grows it."""
    prefilled = capacity_at(buffer, workload, workload.prompt_tokens - 1)
    after = capacity_at(buffer, workload, workload.total_tokens)
    before = prefilled if after <= prefilled else max(after - STEP, prefilled)
    return Occupancy(before, after, min(after, buffer.held_tokens(workload.total_tokens)), kv)
