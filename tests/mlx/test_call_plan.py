"""The calls that can have the peak are calls of mlx-lm's loop, and none is larger."""

from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.specs import KVBuffer
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.call_plan import CHUNKS, planned_calls, planned_chunks
from memfit.estimators.mlx.kv_cache import grown

WORKLOADS = st.builds(
    lambda cached_tokens, new_tokens, **settings: Workload(
        prompt_tokens=cached_tokens + new_tokens, cached_tokens=cached_tokens, **settings
    ),
    cached_tokens=st.just(0) | st.integers(1, 2000),
    new_tokens=st.integers(1, 3000),
    max_tokens=st.integers(0, 600),
    prefill_step=st.integers(1, 700),
    kv_bits=st.sampled_from([None, 4]),
    quantized_kv_start=st.integers(0, 4000),
)


def loop(workload: Workload) -> dict[int, int]:
    """Return the tokens of each call of a run by its position (generate.py, generate_step)."""
    calls, position = {}, workload.cached_tokens
    for chunk in (*workload.prefill_chunks(), *[1] * (workload.max_tokens + 1)):
        calls[position] = chunk
        position += chunk
    return calls


@given(WORKLOADS)
def test_every_planned_call_is_one_that_mlx_lm_makes(workload: Workload) -> None:
    calls = loop(workload)
    for planned in (*planned_calls(workload), *planned_chunks(workload)):
        assert calls[planned.position] == planned.tokens


@given(WORKLOADS)
def test_every_chunk_is_covered_by_a_planned_one_of_at_least_its_size(workload: Workload) -> None:
    prompt = workload.prompt_tokens - 1
    planned = planned_chunks(workload)
    for position, tokens in loop(workload).items():
        if position < prompt:
            assert any(c.position >= position and c.tokens >= tokens for c in planned)


@given(WORKLOADS)
def test_the_last_whole_chunk_that_grows_a_cache_is_planned(workload: Workload) -> None:
    buffer, step = KVBuffer(1, 1, 1), workload.prefill_step
    growing: list[int] = []
    cached = capacity = workload.cached_tokens
    for position in range(cached, workload.prompt_tokens - step, step):
        before, capacity = capacity, grown(buffer, capacity, position, step)
        growing += [position] * (capacity > before)
    planned = {call.position for call in planned_calls(workload) if call.tokens == step}
    assert not growing or growing[-1] in planned


@given(WORKLOADS)
def test_the_first_and_the_last_call_are_planned_in_order(workload: Workload) -> None:
    planned = planned_calls(workload)
    positions = [call.position for call in planned]
    assert positions == sorted(set(positions))
    assert positions[0] == workload.cached_tokens
    assert positions[-1] == workload.total_tokens - 1


@given(WORKLOADS)
def test_caches_are_quantised_after_the_call_that_reaches_the_start(workload: Workload) -> None:
    for call in planned_calls(workload):
        if call.phase == "converting":
            start = max(1, workload.quantized_kv_start)
            assert call.position < start <= call.position + call.tokens


@given(WORKLOADS)
def test_chunks_end_before_the_last_token_of_the_prompt(workload: Workload) -> None:
    for call in planned_calls(workload):
        if call.phase in CHUNKS - {"converting"}:
            assert call.position + call.tokens < workload.prompt_tokens
