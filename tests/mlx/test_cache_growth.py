"""The capacity of caches: the closed form, single steps, and mlx-lm's classes agree."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.specs import STEP, Growth, KVBuffer
from memfit.estimators.base.workload import MAX_TOKENS, Workload
from memfit.estimators.mlx.kv_cache import capacity_at, grown, grown_singly

BUFFERS = st.builds(
    KVBuffer,
    st.just(1),
    st.just(1),
    st.just(1),
    growth=st.sampled_from([Growth.STEPS, Growth.DOUBLING]),
) | st.builds(
    KVBuffer,
    st.just(1),
    st.just(1),
    st.just(1),
    growth=st.sampled_from([Growth.ROTATING, Growth.CHUNKED]),
    limit=st.integers(5, 1500),
)
WORKLOADS = st.builds(
    lambda cached_tokens, new_tokens, **settings: Workload(
        prompt_tokens=cached_tokens + new_tokens, cached_tokens=cached_tokens, **settings
    ),
    cached_tokens=st.just(0) | st.integers(1, 3000),
    new_tokens=st.integers(1, 6000),
    max_tokens=st.integers(0, 1200),
    prefill_step=st.sampled_from([1, 2, 7, 96, 100, 128, 250, 256, 300, 512, 1000, 2048]),
)


def stepped(buffer: KVBuffer, workload: Workload) -> int:
    """Return the capacity after every call of a run, in order."""
    position = workload.cached_tokens
    capacity = buffer.held_tokens(position)
    for chunk in (*workload.prefill_chunks(), *[1] * (workload.max_tokens + 1)):
        capacity = grown(buffer, capacity, position, chunk)
        position += chunk
    return capacity


@given(BUFFERS, WORKLOADS)
def test_the_closed_form_equals_growth_call_by_call(buffer: KVBuffer, workload: Workload) -> None:
    assert capacity_at(buffer, workload, workload.total_tokens) == stepped(buffer, workload)


@given(BUFFERS, WORKLOADS, st.integers(0, 7200))
def test_there_is_room_for_every_needed_token(
    buffer: KVBuffer, workload: Workload, position: int
) -> None:
    position = max(workload.cached_tokens, min(position, workload.total_tokens))
    assert capacity_at(buffer, workload, position) >= buffer.held_tokens(position)


UNLIMITED = (Growth.STEPS, Growth.DOUBLING)


@pytest.mark.parametrize("growth", list(Growth))
@given(st.integers(1, 2000), st.integers(0, 900), st.integers(5, 600))
def test_growth_token_by_token_equals_growth_at_once(
    growth: Growth, position: int, count: int, limit: int
) -> None:
    buffer = KVBuffer(1, 1, 1, growth, None if growth in UNLIMITED else limit)
    capacity = begun = grown(buffer, 0, 0, position)
    for step in range(count):
        capacity = grown(buffer, capacity, position + step, 1)
    assert grown_singly(buffer, begun, position, count) == capacity


@pytest.mark.parametrize("step", [1, 3, 255, 2047])
@pytest.mark.parametrize("growth", list(Growth))
def test_a_prompt_in_a_billion_chunks_is_as_quick_as_in_one(growth: Growth, step: int) -> None:
    # A walk over the chunks would take minutes.
    limit = None if growth in UNLIMITED else MAX_TOKENS // 2
    workload = Workload(prompt_tokens=MAX_TOKENS, prefill_step=step)
    buffer = KVBuffer(1, 1, 1, growth, limit)
    capacity = capacity_at(buffer, workload, MAX_TOKENS)
    held = buffer.held_tokens(MAX_TOKENS)
    least = held - step if growth is Growth.PROMPT else held
    most = 2 * held if growth is Growth.DOUBLING else held
    assert least <= capacity <= most + step + 2 * STEP


@pytest.mark.parametrize("step", [32, 100, 256])
@pytest.mark.parametrize("growth", list(Growth))
def test_the_libraries_own_caches_grow_the_same_way(growth: Growth, step: int) -> None:
    pytest.importorskip("mlx_lm", reason="the caches are mlx-lm's")
    from mlx_lm.models import cache, deepseek_v41

    classes: dict[Growth, Any] = {
        Growth.STEPS: lambda: cache.KVCache(),
        Growth.ROTATING: lambda: cache.RotatingKVCache(max_size=300, keep=4),
        Growth.CHUNKED: lambda: cache.ChunkedKVCache(300),
        Growth.ROWS: lambda: deepseek_v41.LayerCache(300),
        Growth.DOUBLING: _doubling,
        Growth.PROMPT: lambda: _Projected(300),
    }
    made = classes[growth]()
    buffer = KVBuffer(1, 1, 1, growth, None if growth in UNLIMITED else 300)
    workload = Workload(prompt_tokens=700, max_tokens=270, prefill_step=step)
    position = 0
    for chunk in (*workload.prefill_chunks(), *[1] * (workload.max_tokens + 1)):
        position += chunk
        assert capacity_at(buffer, workload, position) == room(made, chunk)


def _doubling() -> Any:
    """mlx-vlm's cache, from a copy of its modules: importing them takes seconds."""
    from memfit.estimators.trace.libraries import PrivateLibrary

    try:
        return PrivateLibrary("computing").load("mlx_vlm.models.hy_v4.cache").HyV4KVCache()
    except ModuleNotFoundError:
        pytest.skip("mlx-vlm is not installed")


class _Projected:
    """What glm5_next's attention does with the heads of a prompt (mlx-vlm 0.7.10, _attend)."""

    def __init__(self, limit: int) -> None:
        from mlx_lm.models.cache import KVCache

        self._cache, self._limit, self._seen = KVCache(), limit, 0
        self.keys: Any = None

    def update_and_fetch(self, keys: Any, values: Any) -> None:
        length = keys.shape[2]
        fits = self._cache.offset == self._seen and self._seen + length <= self._limit
        if length > 1 and fits:
            self._cache.update_and_fetch(keys, values)
            self.keys = self._cache.keys
        self._seen += length


def room(made: Any, tokens: int) -> int:
    """Return the room in a cache of mlx-lm after ``tokens`` more."""
    import mlx.core as mx

    if hasattr(made, "update_window"):
        made.update_window(mx.zeros((1, tokens, 1)))
        return int(made.window.shape[1])
    if hasattr(made, "maybe_trim_front"):
        made.maybe_trim_front()
    array = mx.zeros((1, 1, tokens, 1))
    made.update_and_fetch(array, array)
    return 0 if made.keys is None else int(made.keys.shape[2])
