"""The schedule of mlx_lm.server: every request ends, within the limits of the flags."""

from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.caches import STEP
from memfit.estimators.base.units import round_up
from memfit.estimators.mlx.batch_schedule import NAMED_BUFFERS, BatchSchedule, Request
from memfit.estimators.results.server import ServerSettings

REQUESTS = st.lists(st.builds(Request, st.integers(1, 3000), st.integers(1, 90)), min_size=1)
SETTINGS = st.builds(
    ServerSettings,
    prefill_step=st.sampled_from([1024, 2048]),
    prompt_concurrency=st.integers(1, 5),
    decode_concurrency=st.integers(1, 5),
    prompt_cache_size=st.integers(0, 4),
)


@given(REQUESTS, SETTINGS, st.integers(1, 9))
def test_every_buffer_has_room_for_its_requests(
    requests: list[Request], settings: ServerSettings, clients: int
) -> None:
    schedule = BatchSchedule(requests, settings, clients=clients, windows=(300, 1200))
    moments = list(schedule.moments())
    longest = max(each.prompt_tokens + each.max_tokens for each in requests)
    for moment in moments:
        # BatchGenerator._next leaves prompts in flight out of its limit.
        most = settings.rows + settings.prompt_concurrency
        assert moment.running <= most
        assert moment.prefilled_rows <= settings.prompt_concurrency
        assert moment.stored <= settings.prompt_cache_size
        # A shorter row that joins is padded to the longest, and a chunk to its longest prompt.
        assert moment.prefilled_tokens <= longest + settings.prefill_step * len(requests)
        # What the bound of a plan takes for every order of requests.
        assert len(moment.buffers) <= settings.prompt_cache_size + NAMED_BUFFERS
        for each in moment.buffers:
            assert 0 < each.rows <= most
            assert each.capacity <= round_up(longest + settings.prefill_step, STEP) + STEP
            assert all(room < limit + settings.prefill_step for limit, room in each.windows)
    last = moments[-1]
    assert (last.running, last.prefilled_rows) == (0, 0)
    assert last.stored >= min(len(requests), settings.prompt_cache_size)
    assert 0 <= schedule.waited <= len(requests)


@given(REQUESTS, st.integers(1, 3))
def test_with_room_for_every_client_no_request_waits(requests: list[Request], clients: int) -> None:
    settings = ServerSettings(prompt_concurrency=clients, decode_concurrency=clients)
    schedule = BatchSchedule(requests, settings, clients=clients)
    assert list(schedule.moments())
    assert schedule.waited == 0


def test_one_request_runs_through_its_chunks() -> None:
    settings = ServerSettings(prefill_step=512, prompt_cache_size=1)
    moments = list(BatchSchedule([Request(1200, 3)], settings, clients=1).moments())
    assert [m.prefilled_tokens for m in moments if m.prefilled_rows] == [512, 1024, 1199]
    # 1,199 tokens and three more in steps of 256; the prefix of the prompt stays in a variable.
    assert [(each.rows, each.capacity) for each in moments[-1].buffers] == [(1, 1280), (1, 1280)]
