"""A trace of requests through memory and disk."""

from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.specs import KVBuffer
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.request_trace import TraceRequest, read_request_trace
from memfit.estimators.plans.offload.cache_tiers import Tiers, simulate
from memfit.estimators.plans.offload.session_cache import Storage
from memfit.estimators.results.offload import Speeds

# One block of 256 tokens takes 2048 bytes, whatever the turns before.
KEPT = Storage((KVBuffer(1, 2, 2),), state_bytes=0, plain_bytes=2, bits=16, in_blocks=True)
BLOCK = 2048
REQUESTS = st.lists(
    st.builds(TraceRequest, st.integers(1, 2000), st.integers(0, 500), st.sampled_from("abcd")),
    min_size=1,
    max_size=40,
)
BUDGETS = st.builds(Tiers, st.integers(0, 20 * BLOCK), st.integers(0, 40 * BLOCK))


def test_the_least_recently_used_session_moves_to_disk_and_is_reloaded() -> None:
    turns = [TraceRequest(200, 0, agent) for agent in "abab"]
    run = simulate(turns, KEPT, Tiers(BLOCK, 10 * BLOCK), Speeds(1000, 2000, 100))
    assert (run.new, run.hot, run.warm, run.cold) == (2, 0, 2, 0)
    # a and b are evicted once each; after the last request nothing is evicted.
    assert (run.read_bytes, run.written_bytes) == (2 * BLOCK, 2 * BLOCK)
    # The last token of a prompt is always computed.
    assert (run.prefill_tokens, run.saved_tokens) == (402, 398)
    assert (run.read_ms, run.write_ms, run.prefill_ms) == (4096, 2048, 4020)
    assert run.uncached_prefill_ms == 8000


def test_without_a_disk_an_evicted_session_is_lost() -> None:
    turns = [TraceRequest(200, 0, agent) for agent in "abab"]
    run = simulate(turns, KEPT, Tiers(BLOCK, 0), Speeds())
    assert (run.new, run.warm, run.cold, run.written_bytes) == (2, 0, 2, 0)
    assert run.saved_tokens == 0
    assert run.read_ms is run.prefill_ms is None


def test_a_session_larger_than_memory_does_not_evict_the_others() -> None:
    turns = [TraceRequest(200, 0, "a"), TraceRequest(1000, 0, "b"), TraceRequest(300, 0, "a")]
    run = simulate(turns, KEPT, Tiers(2 * BLOCK, 10 * BLOCK), Speeds())
    assert (run.new, run.hot) == (2, 1)
    assert run.largest_hot_bytes == 2 * BLOCK


def test_an_unchanged_session_on_disk_is_not_written_again() -> None:
    turns = [TraceRequest(200, 0, "a"), TraceRequest(200, 0, "b"), TraceRequest(200, 0, "a")]
    turns += [TraceRequest(200, 0, "b"), TraceRequest(200, 0, "a")]
    run = simulate(turns, KEPT, Tiers(BLOCK, 10 * BLOCK), Speeds())
    assert run.written_bytes == 2 * BLOCK
    assert run.warm == 3


@given(REQUESTS, BUDGETS)
def test_every_request_and_every_token_is_counted_once(
    turns: list[TraceRequest], tiers: Tiers
) -> None:
    run = simulate(turns, KEPT, tiers, Speeds())
    assert run.hot + run.warm + run.cold + run.new == run.requests == len(turns)
    assert run.new == run.agents == len({turn.agent for turn in turns})
    assert run.prefill_tokens + run.saved_tokens == sum(turn.prompt_tokens for turn in turns)
    assert run.largest_hot_bytes <= tiers.hot_bytes
    assert run.largest_disk_bytes <= tiers.disk_bytes
    assert run.read_bytes == 0 or run.written_bytes > 0


@given(REQUESTS)
def test_with_room_for_all_the_disk_is_not_used(turns: list[TraceRequest]) -> None:
    run = simulate(turns, KEPT, Tiers(10**9, 0), Speeds())
    assert run.hot == len(turns) - run.agents
    assert run.read_bytes == run.written_bytes == run.cold == 0


@given(REQUESTS, st.integers(1, 20))
def test_hits_equal_a_plain_lru_cache(turns: list[TraceRequest], blocks: int) -> None:
    kept: OrderedDict[str, int] = OrderedDict()
    hits = 0
    for turn in turns:
        hits += kept.pop(turn.agent, None) is not None
        size = -(-(turn.prompt_tokens + turn.completion_tokens) // 256)
        if size <= blocks:
            kept[turn.agent] = size
        while sum(kept.values()) > blocks:
            kept.popitem(last=False)
    assert simulate(turns, KEPT, Tiers(blocks * BLOCK, 0), Speeds()).hot == hits


HEADING = "agent,prompt_tokens,completion_tokens\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", HEADING + "one,1200,80\ntwo,2k,0\n"),
        ("a.csv", "completion_tokens,agent,prompt_tokens,note\n80,one,1200,x\n0,two,2048,\n"),
        ("a.csv", "\ufeff" + HEADING.replace("\n", "\r\n") + "one,1200,80\r\ntwo,2048,0\r\n"),
        (
            "a.jsonl",
            '{"agent": "one", "prompt_tokens": 1200, "completion_tokens": 80}\n\n'
            '{"agent": "two", "prompt_tokens": "2k", "completion_tokens": 0}\n',
        ),
    ],
)
def test_requests_are_read_from_csv_and_json_lines(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    assert read_request_trace(path, agents=True) == (
        TraceRequest(1200, 80, "one"),
        TraceRequest(2048, 0, "two"),
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv:1: the header must name agent"),
        ("a.csv", HEADING, ": no requests"),
        (
            "a.csv",
            "agent,tokens\nx,1\n",
            "the header must name agent, prompt_tokens and completion_tokens",
        ),
        ("a.csv", HEADING + "one,many,0\n", "a.csv:2: prompt_tokens"),
        ("a.csv", HEADING + "one,0,0\n", "a.csv:2: prompt_tokens"),
        ("a.csv", HEADING + "one,1,-1\n", "a.csv:2: completion_tokens"),
        ("a.csv", HEADING + "one,1\n", "a.csv:2: completion_tokens"),
        ("a.csv", HEADING + ",1,1\n", "a.csv:2: agent"),
        ("a.csv", HEADING + '"one,1,1\n', "a.csv:2: "),
        ("a.csv", HEADING + f"{'x' * 5000},1,1\n", "4096 characters"),
        ("a.jsonl", "[]\n", "a.jsonl:1: the row is not a JSON object"),
        ("a.jsonl", "{\n", "a.jsonl:1: the row is not JSON"),
        (
            "a.jsonl",
            '{"agent": "a", "prompt_tokens": 1.5, "completion_tokens": 0}\n',
            "a.jsonl:1: ",
        ),
        (
            "a.jsonl",
            '{"agent": "a", "prompt_tokens": true, "completion_tokens": 0}\n',
            "a.jsonl:1: ",
        ),
        ("a.jsonl", '{"agent": 1, "prompt_tokens": 1, "completion_tokens": 0}\n', "agent"),
    ],
)
def test_an_invalid_request_line_is_reported(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=name) as error:
        read_request_trace(path, agents=True)
    assert message in str(error.value)


def test_a_binary_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"agent\xff\n")
    with pytest.raises(InputError, match="not UTF-8"):
        read_request_trace(tmp_path / "a.csv", agents=True)


def test_a_long_conversation_is_written_as_soon_as_its_request_ends() -> None:
    turns = [TraceRequest(200, 0, "a"), TraceRequest(300, 0, "b"), *[TraceRequest(200, 0, "a")] * 2]
    room = Tiers(10 * BLOCK, 10 * BLOCK)
    run = simulate(turns, KEPT, room, Speeds(), most_kept=200)
    assert (run.hot, run.warm, run.written_bytes) == (2, 0, 2 * BLOCK)
    assert run.largest_hot_bytes == BLOCK
    run = simulate(turns, KEPT, room, Speeds(), most_kept=0)
    # The file of a is as it was, so that it is not written again.
    assert (run.hot, run.warm, run.written_bytes) == (0, 2, 3 * BLOCK)
    assert run.largest_hot_bytes == 0


@given(REQUESTS, BUDGETS, st.integers(0, 3000))
def test_policies_differ_in_where_conversations_are_not_in_what_was_asked(
    requests: list[TraceRequest], tiers: Tiers, most: int
) -> None:
    runs = [
        simulate(requests, KEPT, tiers, Speeds(), most_kept=tokens) for tokens in (None, 0, most)
    ]
    assert len({run.prefill_tokens + run.saved_tokens for run in runs}) == 1
    assert len({run.new for run in runs}) == 1
    assert runs[1].hot == runs[1].largest_hot_bytes == 0
