"""The schedule of mlx_lm.server: every request ends, within the limits of the flags."""

from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.specs import STEP
from memfit.estimators.base.units import round_up
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.mlx.arrivals import AtTimes, ClosedLoop, ServedRequest
from memfit.estimators.mlx.batch_schedule import BatchSchedule, ScheduleMoment
from tests.plans.at_calls import AtCalls

REQUESTS = st.lists(st.builds(ServedRequest, st.integers(1, 3000), st.integers(1, 90)), min_size=1)
SETTINGS = st.builds(
    ServerSettings,
    prefill_step=st.sampled_from([1024, 2048]),
    prompt_concurrency=st.integers(1, 5),
    decode_concurrency=st.integers(1, 5),
    prompt_cache_size=st.integers(0, 4),
)
NAMED_BUFFERS = 7
"""Beside entries: the last prefix, responses, three of a join, prompts and what they joined."""


@given(REQUESTS, SETTINGS, st.integers(1, 9), st.integers(1, 4))
def test_every_buffer_has_room_for_its_requests(
    requests: list[ServedRequest], settings: ServerSettings, clients: int, group: int
) -> None:
    arrivals = ClosedLoop(clients, group=group)
    schedule = BatchSchedule(requests, settings, arrivals, windows=(300, 1200))
    moments = list(schedule.moments())
    longest = max(each.prompt_tokens + each.max_tokens for each in requests)
    for moment in moments:
        # BatchGenerator._next leaves prompts in flight out of its limit.
        most = settings.rows + settings.prompt_concurrency - 1
        assert moment.running <= most
        assert moment.stored <= settings.prompt_cache_size
        if moment.prefilled:
            assert moment.prefilled.rows <= settings.prompt_concurrency
        assert len(moment.buffers) <= settings.prompt_cache_size + NAMED_BUFFERS
        for each in moment.buffers:
            assert 0 < each.rows <= most
            # A row that ends first is padded by a chunk, and room may be left over.
            assert each.capacity <= round_up(longest + 2 * settings.prefill_step, STEP) + STEP
            assert all(room < limit + settings.prefill_step for limit, room in each.windows)
    last = schedule.idle()
    assert (last.running, last.prefilled) == (0, None)
    assert last.stored >= min(len(requests), settings.prompt_cache_size)
    assert 0 <= schedule.waited <= len(requests)


@given(REQUESTS, st.integers(1, 3))
def test_with_room_for_every_client_no_request_waits(
    requests: list[ServedRequest], clients: int
) -> None:
    settings = ServerSettings(prompt_concurrency=clients, decode_concurrency=clients)
    schedule = BatchSchedule(requests, settings, ClosedLoop(clients))
    assert list(schedule.moments())
    assert schedule.waited == 0


def moments_of(
    requests: list[ServedRequest], arrivals: ClosedLoop | AtCalls | AtTimes, kept: int
) -> list[ScheduleMoment]:
    settings = ServerSettings(prefill_step=512, prompt_cache_size=kept)
    return list(BatchSchedule(requests, settings, arrivals).moments())


def test_one_request_runs_through_its_chunks() -> None:
    moments = moments_of([ServedRequest(1200, 3)], ClosedLoop(1), 1)
    assert [m.prefilled.index for m in moments if m.prefilled] == [512, 1024, 1199]
    # 1,199 tokens and four more in steps of 256; the prefix of the prompt stays in a variable.
    assert [(each.rows, each.capacity) for each in moments[-1].buffers] == [(1, 1280), (1, 1280)]


def test_an_entry_that_was_used_keeps_the_states_of_its_whole_batch() -> None:
    """ArraysCache.extract is a slice, which shares the buffer; keys and values are copied."""
    requests = [ServedRequest(100, 5)] * 3 + [ServedRequest(300, 5, 0, 105)]
    arrivals = ClosedLoop(3, group=3)
    schedule = BatchSchedule(requests, ServerSettings(), arrivals, has_states=True)
    buffers = {each for moment in schedule.moments() for each in moment.buffers}
    assert schedule.hits == 1
    assert {(each.rows, each.state_rows) for each in buffers if each.state_rows} == {(1, 3)}


def test_a_row_that_stays_keeps_every_token_it_has() -> None:
    moments = moments_of([ServedRequest(100, 2), ServedRequest(100, 9)], ClosedLoop(2), 0)
    # The prompt's last token, and nine more.
    assert max(each.index for moment in moments for each in moment.buffers) == 109


def test_a_request_that_arrives_drops_the_last_prefix() -> None:
    stays = moments_of([ServedRequest(600, 2)], AtCalls([0]), 0)
    dropped = moments_of([ServedRequest(600, 2), ServedRequest(1, 1)], AtCalls([0, 2]), 0)
    prefix = [(each.rows, each.index) for each in stays[-1].buffers]
    assert (1, 599) in prefix
    assert all(each.index != 599 for each in dropped[-1].buffers)


def test_a_join_has_its_parts_beside_it() -> None:
    moments = moments_of([ServedRequest(300, 50), ServedRequest(300, 5)], AtCalls([0, 3]), 0)
    rows = max(sum(each.rows for each in moment.buffers) for moment in moments)
    # A row of each part, the joined two, and the last prefix.
    assert rows >= 5


def test_the_batch_of_a_reply_that_ended_outlives_a_pause() -> None:
    moments = moments_of([ServedRequest(300, 2), ServedRequest(300, 2)], AtCalls([0, 99]), 0)
    first = [moment for moment in moments if moment.prefilled][1]
    assert [(each.rows, each.index) for each in first.buffers] == [(1, 302)]


def test_a_hit_leaves_one_row_of_its_entry() -> None:
    first = [ServedRequest(300, 2), ServedRequest(300, 2)]
    follows = ServedRequest(400, 2, continues=0, cached_tokens=302)
    moments = moments_of([*first, follows], ClosedLoop(2, group=2), 9)
    assert max(each.rows for each in moments[-1].buffers) == 2
    chunk = [moment for moment in moments if moment.prefilled][-1]
    # The row is copied out of the batch, which is there until the chunk ends.
    assert {(1, 302), (2, 302)} <= {(each.rows, each.index) for each in chunk.buffers}


def test_recorded_times_say_who_runs_together() -> None:
    requests = [ServedRequest(300, 40), ServedRequest(300, 40)]
    together = moments_of(requests, AtTimes(requests, [(0.0, 9.0), (1.0, 9.5)]), 0)
    apart = moments_of(requests, AtTimes(requests, [(0.0, 9.0), (10.0, 19.0)]), 0)
    assert max(moment.running for moment in together) == 2
    assert max(moment.running for moment in apart) == 1


def test_equal_requests_of_one_window_share_their_entries() -> None:
    requests = [ServedRequest(300, 2, text=0)] * 3
    assert moments_of(requests, ClosedLoop(3), 9)[-1].stored == 1
    with_states = BatchSchedule(requests, ServerSettings(), ClosedLoop(3), has_states=True)
    # Their prefix, which cannot be trimmed, and the whole.
    assert list(with_states.moments())[-1].stored == 2


def test_an_equal_request_that_arrives_later_hits() -> None:
    schedule = BatchSchedule(
        [ServedRequest(300, 2, text=0)] * 2, ServerSettings(), AtCalls([0, 99])
    )
    chunks = [moment for moment in schedule.moments() if moment.prefilled]
    assert (len(chunks), schedule.hits) == (1, 1)
