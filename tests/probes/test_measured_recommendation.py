"""Recommendations after a measurement use the measured figures, and say so."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.results.advice import Recommendation
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.recommend import recommend_here
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.experiments.recommendation import advise, by_measurement, line_of
from memfit.probes.result import Point
from tests.models import QWEN3_4B_4BIT, write_config
from tests.probes.points import point, unmeasured

GB = 10**9
ASKED = Workload(prompt_tokens=2049, max_tokens=32, prefill_step=512)
KV_PER_TOKEN = 147_456  # of Qwen3-4B: 36 layers, 8 heads of 128, K and V, 2 bytes each


@pytest.fixture
def sized(tmp_path: Path) -> SizedModel:
    checkpoint = open_checkpoint(str(write_config(tmp_path, QWEN3_4B_4BIT)))
    return size(checkpoint, device=memory_device(8 * GB), margin_bytes=0)


def measured(per_token: int, per_chunk_token: int, fixed: int, *, off: int = 0) -> list[Point]:
    """Five points on a line, except that the third on each axis has an offset."""
    settings = [(2049, 512), (1025, 512), (513, 512), (2049, 256), (2049, 128)]
    return [
        point(
            replace(ASKED, prompt_tokens=tokens, prefill_step=step),
            fixed + per_token * tokens + per_chunk_token * step + off * (index in (2, 4)),
        )
        for index, (tokens, step) in enumerate(settings)
    ]


def test_the_recommended_context_is_the_longest_that_fits_by_the_measured_line(
    sized: SizedModel,
) -> None:
    points = measured(4 * KV_PER_TOKEN, 100_000, 3 * GB)
    recommendation = advise(sized, points)
    assert sized.device
    context = recommendation.context_tokens.value
    assert context
    budget = sized.device.working_set_bytes * 9 // 10
    peak = 3 * GB + 100_000 * 512 + 4 * KV_PER_TOKEN * context
    assert peak <= budget < peak + 256 * 4 * KV_PER_TOKEN
    estimated = recommend_here(sized, ASKED).context_tokens.value
    assert estimated
    assert context < estimated


def test_a_margin_and_the_residual_of_the_third_point_stay_free(sized: SizedModel) -> None:
    assert sized.device
    budget = sized.device.working_set_bytes * 9 // 10
    sized.margin_bytes = GB // 8
    points = measured(4 * KV_PER_TOKEN, 100_000, 3 * GB, off=-GB // 8)
    context, line = advise(sized, points).context_tokens.value, line_of(points)
    assert context
    assert line
    free = [
        line.peak_bytes(n, 512) + line.error_bytes(n) + GB // 8 for n in (context, context + 256)
    ]
    assert free[0] <= budget < free[1]
    assert line.error_bytes(context) > GB // 8


def test_a_line_is_never_below_weights_and_caches(sized: SizedModel) -> None:
    points = measured(0, 0, GB // 2)  # below the weights alone
    far = replace(ASKED, prompt_tokens=30_001)
    need = by_measurement(sized, points, line_of(points)).requirement(far).peak_bytes
    kept = sized.resident_bytes + sized.figures_for(far).kv.nbytes
    assert need == kept + sized.margin_bytes


def test_the_largest_measured_step_that_fits_is_recommended(sized: SizedModel) -> None:
    assert sized.device
    room = sized.device.working_set_bytes * 9 // 10 - 3 * GB
    recommendation = advise(sized, measured(0, room // 300, 3 * GB))
    assert recommendation.prefill_step.value == 256


def test_a_step_above_the_measured_ones_must_also_fit_by_the_estimate(sized: SizedModel) -> None:
    points = measured(0, 0, 3 * GB)
    asked = by_measurement(sized, points, line_of(points))
    large = replace(ASKED, prompt_tokens=40_001, prefill_step=16_384)
    assert asked.requirement(large) == sized.requirement(large)


def test_measured_kv_bits_have_a_measured_basis(sized: SizedModel) -> None:
    assert sized.device
    eight = replace(ASKED, kv_bits=8, quantized_kv_start=0)
    too_large = sized.device.working_set_bytes
    steps = (ASKED.prefill_step, 256, 128)

    def points(workload: Workload, peak: int) -> list[Point]:
        return [point(replace(workload, prefill_step=step), peak) for step in steps]

    asked = points(ASKED, too_large)
    assert advise(sized, [*asked, *points(eight, too_large)]).kv_bits.value == 4
    assert advise(sized, [*asked, *points(eight, 3 * GB)]).kv_bits.value == 8
    fitting = [*points(ASKED, 3 * GB), *points(eight, too_large)]
    assert advise(sized, fitting).kv_bits.state == "keep"


def test_a_measured_point_is_judged_by_its_measurement(sized: SizedModel) -> None:
    assert sized.device
    points = [point(ASKED, sized.device.working_set_bytes + 1)]
    need = by_measurement(sized, points, None).requirement(ASKED)
    assert judge(need, sized.device) == ("exceeds", ("working_set",))


def test_a_prompt_too_short_for_a_line_gives_the_needed_length(sized: SizedModel) -> None:
    short = replace(ASKED, prompt_tokens=1000)
    recommendation = advise(sized, [point(short, 2 * GB)])
    assert recommendation.reasons[0] == (
        "based on 1 measured peak and the estimate; a prompt of 1537 tokens would show how much"
        " each token adds"
    )
    assert recommendation.context_tokens == recommend_here(sized, short).context_tokens


def test_the_suggested_prompt_is_within_the_limit_of_the_model(sized: SizedModel) -> None:
    long_step = replace(ASKED, prefill_step=20_000)
    reasons = advise(sized, [point(long_step, 3 * GB)]).reasons
    assert reasons[0].endswith(
        "; a prompt of 24577 tokens in prefill steps of 8192 would show how much each token adds"
    )


def test_the_line_is_printed_with_its_residual(sized: SizedModel) -> None:
    reasons = advise(sized, measured(1000, 2000, GB, off=-7)).reasons
    assert reasons[0] == (
        "based on 5 measured peaks and a line through them, valid near them; its terms are not"
        " parts of the memory: 1.0 GB + 1.0 kB per prompt token + 2.0 kB per token of the"
        " prefill step; a third peak is 7 B below it: that much is kept free, and proportionally"
        " more beyond 2049 tokens"
    )


def test_a_smaller_step_is_compared_with_the_asked_one_in_one_way(sized: SizedModel) -> None:
    asked = replace(ASKED, prefill_step=2048)
    half = replace(asked, prefill_step=1024)
    estimated, smaller = (sized.figures_for(each).moment.nbytes for each in (asked, half))
    assert smaller < estimated

    def reason(*points: Point) -> str:
        return advise(sized, points).prefill_step.reason

    # A measured peak below every estimate says nothing of a step that was not measured.
    measured_peak = point(asked, smaller - 1)
    assert "takes more memory" not in reason(measured_peak)
    assert "a step of 1024 takes more memory" in reason(measured_peak, point(half, smaller))
    # An estimate that was too low is taken to be again.
    missed = by_measurement(sized, [point(asked, estimated + GB)], None)
    assert missed.figures_for(half).moment.nbytes == smaller + GB


def test_a_line_that_falls_with_the_prompt_is_not_used(sized: SizedModel) -> None:
    points = measured(-1000, 0, 3 * GB)
    assert line_of(points) is None
    estimated = recommend_here(sized, ASKED)
    assert advise(sized, points).context_tokens == estimated.context_tokens


def test_other_bits_and_failed_points_are_not_on_the_line() -> None:
    points = measured(1000, 2000, GB)
    eight = point(replace(ASKED, prompt_tokens=4097, kv_bits=8), 9 * GB)
    failed = unmeasured(replace(ASKED, prompt_tokens=8193))
    wired = replace(points[0], workload=replace(ASKED, prompt_tokens=1537), wired_limit_bytes=GB)
    assert line_of([*points, eight, failed, wired]) == line_of(points)


def test_without_measurements_the_estimate_is_used_with_a_note(sized: SizedModel) -> None:
    recommendation = advise(sized, [unmeasured(ASKED)])
    assert recommendation.reasons[0] == "nothing was measured: all of this is based on the estimate"
    estimated = recommend_here(sized, ASKED)
    assert replace(recommendation, basis=()) == estimated
    assert isinstance(recommendation, Recommendation)
