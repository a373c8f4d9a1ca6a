"""Both sides of every figure: medians, spreads, differences and unaccounted bytes."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.probes.figures import (
    FIGURES,
    EstimatedFigure,
    TuneFigure,
    measured_figures,
    paired_figures,
    partial_figures,
)
from memfit.probes.speed import median_speed
from tests.probes.measurements import LOADED, RUN

WORKLOAD = Workload(prompt_tokens=600, max_tokens=9)
NO_SWIFT = (None, None)
RUNS = tuple(replace(RUN, prefill_peak_bytes=peak) for peak in (4_000, 4_300, 4_100))
ESTIMATES = {
    "weights": EstimatedFigure(900, "exact"),
    "active": EstimatedFigure(1_000, "exact"),
    "kv": EstimatedFigure(500, "exact"),
    "ssm": EstimatedFigure(0, "exact"),
    "peak": EstimatedFigure(3_500, "traced"),
}


def by_name(figures: tuple[TuneFigure, ...]) -> dict[str, TuneFigure]:
    return {figure.name: figure for figure in figures}


def test_the_median_is_shown_with_the_spread_and_the_difference() -> None:
    runs = [replace(run, decode_peak_bytes=1) for run in RUNS]
    peak = by_name(paired_figures(measured_figures(LOADED, runs, NO_SWIFT), ESTIMATES))["peak"]
    assert (peak.measured_bytes, peak.spread_bytes) == (4_100, 300)
    assert (peak.estimated_bytes, peak.difference_bytes) == (3_500, 600)
    assert peak.basis == "traced"


def test_the_peak_of_a_warm_up_is_shown_where_it_is_above_every_repeat() -> None:
    for peak, expected in ((4_200, None), (4_301, 4_301)):
        warm_up = replace(RUN, prefill_peak_bytes=peak, decode_peak_bytes=1)
        runs = [replace(run, decode_peak_bytes=1) for run in RUNS]
        found = by_name(
            paired_figures(measured_figures(LOADED, runs, NO_SWIFT, warm_up), ESTIMATES)
        )
        assert found["peak"].measured_bytes == 4_100
        shown = found.get("warm_up_peak")
        assert (shown.measured_bytes if shown else None) == expected


def test_of_two_repeats_the_median_is_one_that_was_measured() -> None:
    peak = by_name(paired_figures(measured_figures(LOADED, RUNS[:2], NO_SWIFT), ESTIMATES))[
        "prefill_peak"
    ]
    assert peak.measured_bytes == 4_000


@given(
    active=st.integers(0, 10**12),
    kv=st.integers(0, 10**12),
    ssm=st.integers(0, 10**12),
    peak=st.integers(0, 10**12),
)
def test_unaccounted_bytes_complete_the_sum(active: int, kv: int, ssm: int, peak: int) -> None:
    run = replace(RUN, kv_bytes=kv, ssm_bytes=ssm, prefill_peak_bytes=peak, decode_peak_bytes=0)
    values = measured_figures(replace(LOADED, active_bytes=active), [run], NO_SWIFT)
    rest = by_name(paired_figures(values, ESTIMATES))["unaccounted"].measured_bytes
    workspace = 3_500 - 1_000 - 500
    assert rest is not None
    assert active + kv + ssm + workspace + rest == peak


def test_without_an_estimate_no_bytes_are_unaccounted() -> None:
    figures = by_name(paired_figures(measured_figures(LOADED, RUNS, (7, None)), {}))
    assert "unaccounted" not in figures
    assert figures["swift_workspace"].measured_bytes == 7
    assert figures["kv"].difference_bytes is None


def test_a_stopped_run_keeps_the_figures_received() -> None:
    values = partial_figures({"prefill_kv_bytes": 5, "prefill_peak_bytes": 9, "first_token_ns": 3})
    figures = by_name(
        paired_figures({**values, **measured_figures(LOADED, [], NO_SWIFT)}, ESTIMATES)
    )
    assert figures["prefill_kv"].measured_bytes == 5
    assert figures["prefill_peak"].measured_bytes == 9
    assert figures["weights"].measured_bytes == LOADED.weights_bytes
    assert figures["peak"].measured_bytes is None


def test_without_a_loaded_model_nothing_is_measured() -> None:
    assert measured_figures(None, [], NO_SWIFT) == {}


def test_figures_have_a_fixed_order() -> None:
    names = [
        figure.name
        for figure in paired_figures(measured_figures(LOADED, RUNS, (7, None)), ESTIMATES)
    ]
    assert names == [name for name in FIGURES if name in names]


def test_speeds_are_from_the_median_repeat() -> None:
    runs = [
        replace(RUN, first_token_ns=ns, decode_ns=4 * ns) for ns in (3 * 10**9, 10**9, 2 * 10**9)
    ]
    found = median_speed(WORKLOAD, runs)
    assert found is not None
    assert found.first_token_ns == 2 * 10**9
    assert found.prefill_tokens_per_second == 300
    assert found.first_token_spread_ns == 2 * 10**9
    assert found.prefill_spread == 600 - 200
    assert found.decode_tokens_per_second == 1  # eight tokens after the first in eight seconds


def test_one_token_has_no_decode_speed() -> None:
    found = median_speed(Workload(prompt_tokens=600, max_tokens=1), [RUN])
    assert found is not None
    assert found.decode_tokens_per_second is None
    assert median_speed(WORKLOAD, []) is None
