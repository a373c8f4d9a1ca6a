"""The bound of a server: no order of requests passes it, and it is near what some order takes."""

import random

import pytest

from benchmarks.server_bound import (
    MODELS,
    MOST,
    Question,
    Search,
    Sent,
    Traffic,
    flags,
    sized_sample,
)
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.plans.server.mixes import usual_mixes
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.server_bound import ServerBound, need_of
from memfit.estimators.sizing.serving import fitting_flags

# Plain caches, windows, recurrent states beside caches, convolution states.
SAMPLES = ("qwen3-8b-4bit", "gemma-3-27b", "qwen3.6-35b-a3b", "lfm2-1.2b")
QUESTIONS_EACH, TRAFFICS_EACH = 5, 10


def questions(seed: int, count: int) -> list[Question]:
    choose = random.Random(seed).choice
    return [
        Question(
            choose((1, 300, 700, 1500, 3000)),
            choose((1, 40, 300)),
            choose((1, 2, 3, 4, 6)),
            flags(
                choose((1, 1, 2, 3, 8)),
                choose((1, 2, 3, 4, 32)),
                choose((0, 0, 1, 2, 3, 5, 10)),
                choose((100, 256, 512, 2048)),
            ),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", SAMPLES)
def test_no_simulated_order_passes_the_bound(name: str) -> None:
    sized = sized_sample(name, 96)
    for number, question in enumerate(questions(len(name), QUESTIONS_EACH)):
        search = Search(sized, question, seed=number)
        found, _ = search.run(TRAFFICS_EACH)
        assert found <= search.bound, question


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAMPLES)
def test_no_order_that_a_search_climbs_to_passes_the_bound(name: str) -> None:
    sized = sized_sample(name, 96)
    for number, question in enumerate(questions(77, 10)):
        search = Search(sized, question, seed=number)
        found, _ = search.run(60)
        assert found <= search.bound, question


@pytest.mark.exhaustive
@pytest.mark.parametrize("short", sorted(MODELS))
def test_with_a_prompt_cache_the_bound_is_near_what_a_search_finds(short: str) -> None:
    name, gibibytes, limits, settings = MODELS[short]
    sized = sized_sample(name, gibibytes)
    # benchmarks/server_bound.py searches all of them, each with 10,000 traffics.
    searchable = [Question(*limits, flags(*each)) for each in settings]
    for question in [each for each in searchable if each.is_near][::2]:
        search = Search(sized, question)
        found, _ = search.run(600)
        assert found <= search.bound <= MOST * found, question


def test_room_left_over_by_rows_that_left_is_counted() -> None:
    """Prompts that join while others leave keep their room, and grow by whole steps beyond it."""
    sized = sized_sample("qwen3-8b-4bit", 64)
    search = Search(sized, Question(1794, 4, 4, flags(4, 4, 4)))
    # 1,793 tokens are written in chunks with room for 2,048 or, after others, for 255 more.
    chain = [Sent(1794, 1, number if number < 4 else 0) for number in range(24)]
    alone = [Sent(1794, 1, 9 * number) for number in range(24)]
    assert search.peak(Traffic(chain)) > search.peak(Traffic(alone))
    assert search.peak(Traffic(chain)) <= search.bound


@pytest.mark.parametrize(
    ("name", "gibibytes", "prompt", "clients"),
    [("qwen3-8b-4bit", 64, 8192, 4), ("qwen3-30b-a3b-4bit", 96, 32768, 6),
     ("gemma-3-27b", 32, 4096, 1)],
)  # fmt: skip
def test_proposed_flags_are_those_whose_bound_fits(
    name: str, gibibytes: int, prompt: int, clients: int
) -> None:
    sized, device = sized_sample(name, gibibytes), memory_device(gibibytes * 2**30)
    workload = Workload(prompt_tokens=prompt, max_tokens=512)
    bound = ServerBound(sized, workload, clients)
    better = fitting_flags(bound, flags(8, 32, 10), device)
    assert better is not None
    assert judge(need_of(ServerBound(sized, workload, clients).moment(better)), device)[0] == "fits"
    # The cache is the first lever: one more entry would not fit, or is more than was given.
    kept = better.prompt_cache_size
    more = flags(better.prompt_concurrency, better.decode_concurrency, kept + 1)
    assert kept == 10 or judge(need_of(bound.moment(more)), device)[0] != "fits"


def test_a_larger_cache_and_more_clients_never_take_less_nor_more_rows_that_all_use() -> None:
    sized = sized_sample("gemma-3-27b", 32)
    workload = Workload(prompt_tokens=3000, max_tokens=200)

    def need(together: int, decode: int, kept: int, clients: int) -> int:
        return (
            ServerBound(sized, workload, clients).moment(flags(together, decode, kept)).needed_bytes
        )

    for base in ((1, 1, 1, 3), (1, 2, 2, 3), (2, 3, 4, 5), (2, 3, 4, 4), (3, 4, 2, 3)):
        together, _, _, clients = base
        # With more places fewer requests wait, and keep the entries that they begin with.
        for at in range(4) if clients <= together else (2, 3):
            more = tuple(each + (at == place) for place, each in enumerate(base))
            assert need(*base) <= need(*more), (base, more)


@pytest.mark.parametrize("name", ["qwen3-4b-4bit", "gemma-3-4b", "lfm2.5-8b-a1b-4bit"])
@pytest.mark.parametrize("clients", [1, 2, 4, 5, 12])
def test_conversations_that_continue_stay_within_the_bound(name: str, clients: int) -> None:
    bound = ServerBound(
        sized_sample(name, 64), Workload(prompt_tokens=4096, max_tokens=512), clients
    )
    settings = (flags(1, 1, 1), flags(1, 1, 2), flags(1, 4, 1), flags(1, 4, 2), flags(2, 4, 2))
    for each in settings:
        mixes = usual_mixes(bound.memory, 4096, 512, each, clients)
        most = max(mix.needed_bytes for mix, _ in mixes)
        assert most <= bound.moment(each).needed_bytes, each


def test_requests_that_wait_with_an_entry_that_was_dropped_are_counted() -> None:
    """Each of them keeps the buffers of the batch that the entry is a slice of."""
    question = Question(1500, 300, 4, flags(1, 1, 4))
    search = Search(sized_sample("qwen3-8b-4bit", 64), question)
    # Each finds the oldest entry, which the next one drops.
    again = Traffic([Sent(1500, 300, after=6) for _ in range(28)])
    others = Traffic([Sent(1500, 300) for _ in range(28)])
    row = 1800 * 36 * 8 * 128 * 2 * 2
    assert search.peak(again) > search.peak(others) + 2 * row
    assert search.peak(again) <= search.bound


def test_a_single_chunk_shorter_than_the_longest_can_take_more() -> None:
    """Fewer operations are in flight in a chunk of 1,499 tokens than in one of 1,281."""
    search = Search(sized_sample("qwen3-8b-4bit", 96), Question(1500, 300, 1, flags(3, 2, 0)))
    longest = search.peak(Traffic([Sent(1500, 2)]))
    assert longest < search.peak(Traffic([Sent(1282, 2)])) <= search.bound


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("lfm2-1.2b", Question(1, 2, 2, flags(1, 1, 0))),
        ("granite-4.0-h-tiny", Question(1, 1, 2, flags(1, 1, 1, 512))),
        ("lfm2-1.2b", Question(1500, 1, 1, flags(1, 2, 0))),
    ],
)
def test_requests_that_once_passed_the_bound_stay_within_it(name: str, question: Question) -> None:
    search = Search(sized_sample(name, 96), question)
    found, _ = search.run(30)
    assert found <= search.bound
