"""The longest prompt by trace: the result of the formulas is confirmed, even if they are wrong."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.local.directory import read_directory
from memfit.estimators.machine.devices import working_set_device
from memfit.estimators.sizing.advise import advise
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.recommend import recommend_here
from memfit.estimators.sizing.search import CONTEXT_STEP, fits_comfortably, longest_context
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.sizing.trace_search import MAX_TRACES, TraceSearch
from tests.models import QWEN3_4B, write_config

SMALL = {**QWEN3_4B, "num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 8192}
CASE = Path(__file__).parents[1] / "arch" / "cases" / "mamba2.json"
ASKED = Workload(prompt_tokens=300, max_tokens=0)
MOST = 8192


@pytest.fixture(autouse=True)
def _mlx_lm() -> None:
    pytest.importorskip("mlx_lm")


@pytest.fixture
def traced(tmp_path: Path) -> SizedModel:
    """A traced model on a machine with room for about 4000 tokens."""
    checkpoint = read_directory(write_config(tmp_path, SMALL))
    sized = size(checkpoint, device=working_set_device(10**12), method="trace")
    need = sized.requirement(replace(ASKED, prompt_tokens=4096)).peak_bytes
    return sized.on(working_set_device(need * 10 // 9 + 1))


def search(traced: SizedModel, formula: SizedModel) -> TraceSearch:
    return TraceSearch(traced, formula, ASKED)


def by_formula(traced: SizedModel) -> SizedModel:
    formula = traced.formula_view()
    assert formula is not None
    return formula


def truly_longest(traced: SizedModel) -> int:
    found = longest_context(traced, ASKED, MOST)
    assert found is not None
    return found


@pytest.mark.parametrize("share", [-3, -1, 1, 3])
def test_a_formula_that_is_too_high_or_too_low_does_not_decide(
    traced: SizedModel, share: int
) -> None:
    assert traced.device is not None
    wrong = traced.device.working_set_bytes * share // 50
    formula = replace(by_formula(traced), margin_bytes=wrong)
    searching = search(traced, formula)
    found = searching.longest_context(MOST)
    assert found is not None
    right = truly_longest(traced)
    assert right * 7 // 8 <= found <= right
    prompt = ASKED.prompt_only(found)
    assert not searching.caveat(prompt)
    # Without the last token, which needs less.
    assert searching._traced[prompt] is not traced
    assert searching.requirement(prompt) == traced.requirement(prompt)
    assert searching.too_long is not None
    assert searching.too_long > found


def test_a_largest_allocation_known_only_to_the_trace_needs_few_traces(traced: SizedModel) -> None:
    assert traced.device is not None
    workload = replace(ASKED, prompt_tokens=2 * CONTEXT_STEP)
    largest = traced.requirement(workload).largest_buffer_bytes
    strict = replace(traced.device, working_set_bytes=10**12, max_buffer_bytes=largest)
    lenient = replace(strict, max_buffer_bytes=None)
    searching = search(traced.on(strict), by_formula(traced.on(lenient)))
    found = searching.longest_context(MOST)
    if found is not None:
        assert fits_comfortably(traced.on(strict), ASKED.prompt_only(found))
    assert len(searching._traced) <= MAX_TRACES


def test_without_room_only_what_is_asked_is_traced(traced: SizedModel) -> None:
    small = working_set_device(10**7)
    searching = search(traced.on(small), by_formula(traced.on(small)))
    assert searching.longest_context(MOST) is None
    assert set(searching._traced) <= {ASKED}
    assert searching.too_long == CONTEXT_STEP


def recurrent(folder: Path) -> SizedModel:
    """A traced model with states that do not grow: every chunk takes about as much."""
    checkpoint = read_directory(write_config(folder, json.loads(CASE.read_text())))
    return size(checkpoint, device=working_set_device(10**12), method="trace")


def test_a_first_chunk_scales_the_formula_for_prompts_of_one_chunk(tmp_path: Path) -> None:
    large, asked = recurrent(tmp_path), replace(ASKED, prompt_tokens=MOST)
    chunk = large.requirement(asked.prompt_only(asked.prefill_step + 1)).peak_bytes
    sized = large.on(working_set_device((chunk - 1000) * 10 // 9))
    searching = TraceSearch(sized, by_formula(sized), asked)
    found = asked.prefill_step - CONTEXT_STEP
    # Without it, a whole chunk is traced that is over.
    assert searching.longest_context(MOST) == found
    assert [each.prompt_tokens for each in searching._traced] == [MOST, found]
    assert not fits_comfortably(sized, asked.prompt_only(asked.prefill_step))


def test_a_chunk_that_is_over_rules_out_all_longer_prompts(tmp_path: Path) -> None:
    large, asked = recurrent(tmp_path), replace(ASKED, prompt_tokens=MOST)
    chunk = large.requirement(asked.prompt_only(asked.prefill_step + 1)).peak_bytes
    sized = large.on(working_set_device(chunk * 10 // 9 - 10))
    searching = TraceSearch(sized, by_formula(sized), asked)
    found = searching.longest_context(MOST)
    assert found is not None
    assert found <= asked.prefill_step
    assert all(each.prompt_tokens <= asked.prefill_step for each in {*searching._traced} - {asked})
    longer = asked.prompt_only(asked.prefill_step + CONTEXT_STEP)
    assert searching.requirement(longer).peak_bytes >= chunk


def test_other_weights_are_by_formula_where_none_fits_as_it_is(traced: SizedModel) -> None:
    small = traced.on(working_set_device(traced.resident_bytes))
    advice, by = advise(small, ASKED), advise(by_formula(small), ASKED)
    assert advice.recommendation.weight_bits.reason.startswith(
        "8 is the most that fits, by formula"
    )
    assert advice.recommendation.weight_bits.value == by.recommendation.weight_bits.value
    request = [each for each in by.actions if each.goal == "request"]
    assert advice.actions == tuple(request)
    assert [row.label for row in advice.grid.rows] == [row.label for row in by.grid.rows]


def test_bits_that_are_not_searched_are_not_called_quantised_already(traced: SizedModel) -> None:
    reason = "fewer are not searched here: memfit estimate --quantize 8"
    assert recommend_here(traced, ASKED).weight_bits.reason == reason
