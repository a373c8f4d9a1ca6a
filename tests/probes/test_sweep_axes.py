"""The axes of a sweep: any text is an axis or a one-line error; the set of points is limited."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import Workload
from memfit.probes.sweep_axes import MAX_POINTS, SweepAxis, parse_axis, sweep_workloads

ASKED = Workload(prompt_tokens=700, max_tokens=8, prefill_step=512)


def test_counts_are_read_as_in_other_options() -> None:
    assert parse_axis("context=1k,4k,16k") == SweepAxis("context", (1024, 4096, 16384))
    assert parse_axis(" prefill-step = 256 , 512") == SweepAxis("prefill-step", (256, 512))


def test_no_quantisation_is_a_value_of_the_kv_bits_axis() -> None:
    assert parse_axis("kv-bits=none,8,4") == SweepAxis("kv-bits", (None, 8, 4))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not a sweep; write prefill-step=256,512,1024, kv-bits=none,8,4, context="),
        ("batch=0", "batch: 0: must be at least 1 sequence"),
        ("margin=1,2", "margin=1,2: not a sweep"),
        ("context", "context: not a sweep"),
        ("context=", "context: '' is not a count"),
        ("context=1k,,2k", "context: '' is not a count"),
        ("context=0", "context: 0: must be at least 1 token"),
        ("context=-1", "context: '-1' is not a count"),
        ("context=1k,1024", "context: 1024 is given twice"),
        ("kv-bits=7", "kv-bits: 7: KV bits in MLX are one of none, 2, 3, 4, 5, 6, 8"),
        ("kv-bits=none,none", "kv-bits: none is given twice"),
        ("context=" + "9," * 4000, "not a sweep"),
    ],
)
def test_a_bad_sweep_is_reported_with_the_expected_form(text: str, named: str) -> None:
    with pytest.raises(InputError) as error:
        parse_axis(text)
    assert named in str(error.value)
    assert len(str(error.value)) < 400


@given(st.text() | st.from_regex(r"(context|kv-bits|prefill-step)=[0-9knoe,.]{0,20}"))
def test_any_text_is_an_axis_or_gives_a_one_line_error(text: str) -> None:
    try:
        axis = parse_axis(text)
    except InputError as error:
        outcome = str(error)
    else:
        outcome = axis.name
        assert len(set(axis.values)) == len(axis.values) > 0
    assert outcome.isprintable()


def test_every_combination_is_a_point_and_other_settings_are_kept() -> None:
    points = sweep_workloads(
        [parse_axis("context=1k,2k"), parse_axis("prefill-step=128,256")], ASKED
    )
    assert [(p.prompt_tokens, p.prefill_step) for p in points] == [
        (1024, 128),
        (1024, 256),
        (2048, 128),
        (2048, 256),
    ]
    assert {p.max_tokens for p in points} == {8}


def test_swept_bits_apply_from_the_first_token_by_default() -> None:
    bits = [parse_axis("kv-bits=none,4")]
    assert [p.quantized_kv_start for p in sweep_workloads(bits, ASKED)] == [5000, 0]
    swept = sweep_workloads(bits, ASKED, quantized_kv_start=100)
    assert [p.quantized_kv_start for p in swept] == [5000, 100]


def test_an_axis_given_twice_is_rejected() -> None:
    with pytest.raises(InputError, match="context: given twice"):
        sweep_workloads([parse_axis("context=1k"), parse_axis("context=2k")], ASKED)


def test_too_many_points_are_rejected() -> None:
    many = [
        SweepAxis("context", tuple(range(1, 65))),
        SweepAxis("prefill-step", tuple(range(1, 6))),
    ]
    with pytest.raises(InputError, match=f"320 points to measure: at most {MAX_POINTS}"):
        sweep_workloads(many, ASKED)


def test_an_impossible_point_is_rejected() -> None:
    with pytest.raises(InputError, match="prompt tokens 2097152000: must be from 1"):
        sweep_workloads([parse_axis("context=2000m")], ASKED)
