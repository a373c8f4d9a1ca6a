"""The bytes of a conversation over several turns, compared with mlx-lm's own caches."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.estimators.arch.specs import Growth, KVBuffer
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.plans.offload.session_cache import Storage
from tests.selection import examples

mx = pytest.importorskip("mlx.core")
cache_classes = pytest.importorskip("mlx_lm.models.cache")

WIDTH, WINDOW = 32, 300
BUFFERS = (KVBuffer(1, WIDTH, WIDTH), KVBuffer(1, WIDTH, WIDTH, Growth.ROTATING, WINDOW))
TURNS = st.lists(
    st.builds(TraceRequest, st.integers(1, 900), st.integers(0, 60)), min_size=1, max_size=5
)


class Caches:
    """The caches of one conversation, served as by mlx-lm's loop."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.tokens = storage, 0
        self.caches: list[Any] = []

    def turn(self, request: TraceRequest) -> int:
        """Return the tokens that were reused."""
        extra = max(0, self.tokens - (request.prompt_tokens - 1))
        if extra and cache_classes.can_trim_prompt_cache(self.caches):
            self.tokens -= cache_classes.trim_prompt_cache(self.caches, extra)
        elif extra:
            self.tokens = 0
        if not self.tokens:  # what nothing is reused of is dropped
            self.caches = [
                cache_classes.RotatingKVCache(each.limit) if each.limit else cache_classes.KVCache()
                for each in self.storage.buffers
            ]
        reused, prefilled = self.tokens, request.prompt_tokens - 1
        while self.tokens < prefilled:
            self.add(min(self.storage.prefill_step, prefilled - self.tokens))
        while self.tokens < request.total_tokens:
            self.add(1)
        return reused

    def add(self, count: int) -> None:
        rows = mx.zeros((1, 1, count, WIDTH), mx.bfloat16)
        for cache in self.caches:
            cache.update_and_fetch(rows, rows)
        self.tokens += count

    def nbytes(self) -> int:
        quantises = self.storage.bits < 16
        return sum(
            cache.to_quantized(self.storage.group_size, self.storage.bits).nbytes
            if quantises and type(cache) is cache_classes.KVCache
            else cache.nbytes
            for cache in self.caches
        )


@settings(max_examples=examples(60))
@given(TURNS, st.sampled_from(((0,), (1,), (0, 1, 0))), st.sampled_from((16, 8, 4)))
def test_every_turn_leaves_the_bytes_of_mlx_lms_caches(
    turns: list[TraceRequest], kinds: tuple[int, ...], bits: int
) -> None:
    buffers = tuple(BUFFERS[kind] for kind in kinds)
    storage = Storage(buffers, 0, 2, bits, group_size=32, prefill_step=250)
    caches, held = Caches(storage), None
    for request in turns:
        reused = storage.reused(held, request.prompt_tokens)
        held = storage.after(held, request)
        assert caches.turn(request) == reused
        assert (held.tokens, held.nbytes) == (caches.tokens, caches.nbytes())
