"""Sentences on speed and memory agree with their points."""

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.probes.speed_tradeoff import speed_tradeoffs
from tests.probes.points import point, unmeasured

ASKED = Workload(prompt_tokens=4097, max_tokens=32, prefill_step=512)
GB = 10**9


def test_a_faster_step_states_its_extra_memory() -> None:
    small = point(replace(ASKED, prefill_step=128), GB, reads=300.0)
    large = point(ASKED, GB + GB // 10, reads=420.0)
    assert speed_tradeoffs([large, small]) == (
        "prefill step: 512 reads 40 % faster, 420 tokens/s, and takes 100.0 MB (10 %) more than"
        " 128",
    )


def test_speeds_within_the_spread_of_repeats_are_no_gain() -> None:
    small = point(replace(ASKED, prefill_step=128), GB, reads=300.0, spread=130.0)
    large = point(ASKED, GB + GB // 10, reads=420.0)
    assert speed_tradeoffs([large, small]) == (
        "prefill step: 128 takes the least, 1.0 GB, and reads 300 tokens/s; no other is clearly"
        " faster: repeats differ by 130",
    )


def test_speeds_of_single_runs_are_not_compared() -> None:
    small = replace(point(replace(ASKED, prefill_step=128), GB, reads=300.0), repeats=1)
    large = point(ASKED, GB + GB // 10, reads=420.0)
    assert speed_tradeoffs([large, small]) == (
        "prefill step: 512 takes 100.0 MB (10 %) more than 128; speeds of single runs are not"
        " compared",
    )


def test_a_setting_that_is_best_in_speed_and_memory_is_named() -> None:
    slow = point(replace(ASKED, kv_bits=4, quantized_kv_start=0), GB + 1, writes=20.0)
    assert speed_tradeoffs([point(ASKED, GB, writes=30.0), slow]) == (
        "KV bits: unquantised takes the least, 1.0 GB, and writes 30.0 tokens/s; no other is"
        " clearly faster: repeats differ by 0.0",
    )


def test_a_longer_context_states_its_extra_memory_and_slowdown() -> None:
    short = point(replace(ASKED, prompt_tokens=1025), GB, writes=40.0)
    long = point(ASKED, 2 * GB, writes=30.0)
    assert speed_tradeoffs([long, short]) == (
        "context: 4097 tokens take 1.0 GB (100 %) more than 1025; it writes 30.0 tokens/s instead"
        " of 40.0",
    )


def test_a_wired_limit_helps_only_beyond_the_spread_of_repeats() -> None:
    without = point(ASKED, GB, reads=100.0, spread=15.0)
    wired = replace(point(ASKED, GB, reads=110.0, writes=30.0), wired_limit_bytes=GB)
    assert speed_tradeoffs([without, wired]) == (
        "wired limit: with 1.0 GB, it reads 110 tokens/s instead of 100, no clear difference:"
        " repeats differ by 15.0",
        "wired limit: with 1.0 GB, it writes 30.0 tokens/s instead of 10.0",
    )


def test_a_setting_is_judged_by_its_longest_prompt() -> None:
    steps = [replace(ASKED, prefill_step=step) for step in (128, 512)]
    small, large = point(steps[0], GB, writes=None), point(steps[1], 2 * GB, reads=200.0)
    short = [point(replace(work, prompt_tokens=1025), GB, writes=None) for work in steps]
    (sentence,) = speed_tradeoffs([*short, small, large])
    assert "1.0 GB (100 %) more" in sentence


def test_unmeasured_points_are_ignored() -> None:
    assert speed_tradeoffs([point(ASKED, GB), unmeasured(replace(ASKED, prefill_step=128))]) == ()


def test_a_run_with_a_wired_limit_is_not_another_setting() -> None:
    wired = replace(point(replace(ASKED, prefill_step=128), GB), wired_limit_bytes=GB)
    assert speed_tradeoffs([point(ASKED, GB), wired]) == ()
