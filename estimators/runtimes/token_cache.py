"""Runtimes that keep one cache of one element type, which grows by one rule."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import ClassVar

from memfit.estimators.arch.specs import KVBuffer
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import KVCache, state_bytes
from memfit.estimators.results.terms import PeakMoment
from memfit.estimators.runtimes.activation_bound import activation_bound
from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile, plain_profile
from memfit.estimators.runtimes.facets import Cache, OwnContext, context_limit
from memfit.estimators.runtimes.growth import last_growth, rule_of
from memfit.estimators.runtimes.interface import MemoryFigures, RuntimeModel
from memfit.estimators.runtimes.token_cost import TokenCost, attention_buffers


class TokenCacheModel(RuntimeModel, OwnContext, Cache, frozen=True):
    """The rules that such runtimes share; a runtime overrides where it differs.

    Each has a context of its own, and loads GGUF files only where it does not say otherwise.
    """

    kv_bits: ClassVar[tuple[int, ...]] = ()
    """The bits that it can quantise its cache to."""
    table_bytes: ClassVar[int] = 0
    """Bytes a token of a page table."""
    activation_dtype: ClassVar[str | None] = None
    """The element type it computes with; None for the model's."""

    def token_costs(self, workload: Workload) -> tuple[TokenCost, ...]:
        self._require_cache(workload)
        return tuple(
            TokenCost(
                layers,
                self.token_bytes(workload, buffer),
                buffer.limit,
                self.window_capacity(workload, buffer.limit) if buffer.limit else None,
            )
            for buffer, layers in Counter(self.buffers()).items()
        )

    def _require_cache(self, workload: Workload) -> None:
        name = self.runtime.name
        if workload.kv_bits not in (None, *self.kv_bits):
            possible = ", ".join(map(str, self.kv_bits)) or "none"
            raise UnsupportedError(
                f"KV bits {workload.kv_bits}: {name} quantises its cache to these: {possible}"
            )
        if workload.max_kv_size is not None:
            raise UnsupportedError(f"{name} has no rotating cache: leave out max_kv_size")

    def buffers(self) -> Iterable[KVBuffer]:
        """Return the buffers of all layers that it keeps a cache for."""
        return attention_buffers(self.subject.model.mixers())

    def token_bytes(self, workload: Workload, buffer: KVBuffer) -> int:
        """Return the bytes of a token in one buffer."""
        dtype = self.runtime.cache_dtype or self.subject.model.dtype
        return dtypes.nbytes(buffer.elements_per_token, dtype)

    def window_capacity(self, workload: Workload, window: int) -> int | None:
        """Return the largest capacity of a layer with a window; None when it keeps every token."""
        return None

    def memory_profile(self, workload: Workload, figures: MemoryFigures) -> RuntimeMemoryProfile:
        return plain_profile(workload, figures)

    def figures(self, workload: Workload) -> MemoryFigures:
        sizes = self.subject.footprint.sizes
        costs = self.token_costs(workload)
        limit = context_limit(self)
        last = last_growth(rule_of(self.runtime, most=limit), workload.total_tokens)
        kv = self.cache(costs, last.after, workload)
        states = self.states(workload)
        # While a cache grows, the old one is still there.
        growing = sum(cost.allocated_bytes(last.alive - last.after) for cost in costs)
        work = self.workspace(workload) + growing * workload.batch
        total = self.resident_bytes() + kv.nbytes + states + work
        # Keys and values are separate: the largest buffer is half a layer's.
        half = max((-(-cost.token_bytes // 2) for cost in costs), default=0)
        moment = PeakMoment(
            "prefill",
            total,
            work,
            max(max(sizes, default=0), half * last.after),
            "weight or cache",
            tuple(self._explained(costs, last.after, workload, kv, work, total)),
        )
        return MemoryFigures(kv, states, moment)

    def cache(self, costs: tuple[TokenCost, ...], capacity: int, workload: Workload) -> KVCache:
        tokens, batch, table = workload.total_tokens, workload.batch, self.table_bytes
        nbytes = sum(cost.allocated_bytes(capacity) for cost in costs) + table * capacity
        needed = sum(cost.needed_bytes(tokens) for cost in costs) + table * tokens
        return KVCache(
            nbytes=batch * nbytes,
            held_bytes=batch * needed,
            bytes_per_token=sum(cost.bytes_per_token for cost in costs) + table,
            held_tokens=max((cost.needed_tokens(tokens) for cost in costs), default=0),
            allocated_tokens=max((cost.allocated_tokens(capacity) for cost in costs), default=0),
        )

    def states(self, workload: Workload) -> int:
        """Return the bytes of all recurrent states."""
        return state_bytes(self.subject.model, workload.batch)

    def workspace(self, workload: Workload) -> int:
        """Return a bound of what it computes with."""
        model, checkpoint = self.subject.model, self.subject.checkpoint
        rows = min(workload.prefill_step, workload.prompt_tokens) * workload.batch
        width = dtypes.nbytes(1, self.activation_dtype or model.dtype)
        logit_rows = self.logit_rows(workload, rows)
        tensors = (checkpoint.tensors or ()) if checkpoint.source == "gguf" else ()
        return activation_bound(model, tensors, rows=rows, logit_rows=logit_rows, width=width)

    def logit_rows(self, workload: Workload, rows: int) -> int:
        """Return the tokens that it keeps logits of, where ``rows`` are computed at once."""
        return rows

    def _allocation(self) -> Iterator[str]:
        yield from super()._allocation()
        yield "the workspace is a bound by the widest layer, without what kernels add to it"
        if self.subject.checkpoint.source != "gguf":
            name = self.runtime.name
            yield f"{name} loads GGUF files: a conversion's weights will have other sizes"

    def _explained(
        self,
        costs: tuple[TokenCost, ...],
        capacity: int,
        workload: Workload,
        kv: KVCache,
        work: int,
        total: int,
    ) -> Iterator[str]:
        for cost in costs:
            yield (
                f"KV of {cost.layers} layers = {cost.layers} x {cost.token_bytes} bytes"
                f" x {cost.allocated_tokens(capacity)} tokens allocated ({self.runtime.growth})"
                f" x batch {workload.batch} = {cost.allocated_bytes(capacity) * workload.batch}"
                " bytes"
            )
        yield f"KV cache = {kv.nbytes} bytes"
        yield f"peak = weights, cache, states {total - work} + workspace {work} = {total} bytes"
