"""A row of ``memfit fits`` is what an estimate says for its settings, and no better one fits."""

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.progress import FinishedRequest
from memfit.estimators.checkpoint.local.local_models import LocalModel
from memfit.estimators.checkpoint.local.samples import stated_parameters
from memfit.estimators.machine.device import GIB
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.results.fits import Fit, Fits, Sort
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.advise import search_of
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.fits import CONTEXT_OF_USE, Selection, fits
from memfit.estimators.sizing.joint import JointSearch
from memfit.estimators.sizing.opening import weight_bits_of
from memfit.estimators.sizing.sized_model import SizedModel
from tests.selection import QUICK_SAMPLES, quick

SAMPLES = Path(__file__).parents[2] / "sample_configs"
KEPT = [LocalModel(path.stem, "sample", str(path)) for path in sorted(SAMPLES.glob("*.yaml"))]
SOME = [each for each in KEPT if each.name in QUICK_SAMPLES]
some_and_all = pytest.mark.parametrize(
    "kept",
    [
        pytest.param(tuple(SOME), id="some"),
        pytest.param(tuple(KEPT), id="all", marks=pytest.mark.exhaustive),
    ],
)
DEVICES = {name: find_device(name) for name in ("m4-pro-24", "m4-max-64", "rtx-4090")} | {
    "8GB": memory_device(8 * GIB),
    "32GB": memory_device(32 * GIB),
}
STEPS = (2048, 1024, 512, 256, 128)
QUESTIONS = [("m4-pro-24", 4096), ("m4-max-64", 32768), ("32GB", 100), ("8GB", 4096)]
CATALOG = Catalog()


def asked(tokens: int) -> WorkloadQuestion:
    return WorkloadQuestion(prompt_tokens=tokens)


@cache
def answer(machine: str, tokens: int, kept: tuple[LocalModel, ...] = tuple(SOME)) -> Fits:
    return fits(CATALOG, kept, DEVICES[machine], asked(tokens))


def sized_as(row: Fit, machine: str, bits: int | None) -> SizedModel:
    quantize = converted(bits) if bits else None
    return CATALOG.sized(row.reference, quantize=quantize, device=DEVICES[machine])


@some_and_all
@pytest.mark.parametrize(("machine", "tokens"), QUESTIONS)
def test_a_row_is_what_estimate_says(
    machine: str, tokens: int, kept: tuple[LocalModel, ...]
) -> None:
    for row in answer(machine, tokens, kept).models:
        sized = sized_as(row, machine, row.weight_bits)
        run = replace(
            asked(tokens).under(sized.runtime_model.runtime), prefill_step=row.prefill_step
        )
        same = estimate(sized, run, advises=False)
        assert (row.peak_bytes, row.needed_bytes) == (same.peak_bytes, same.needed_bytes)
        assert (row.verdict, row.exceeded) == (same.verdict, same.exceeded)
        assert (row.peak_range_bytes, row.decode_speed) == (
            same.peak_range_bytes,
            same.decode_speed,
        )
        assert row.weights_bytes == same.components.weights.resident_bytes
        assert (row.model.id, row.model.parameters) == (same.model.id, same.model.parameters)


@pytest.mark.parametrize(
    "name", quick(["qwen3.5-35b-a3b", "gemma-3-27b", "qwen3-8b-4bit"], ("gemma-3-27b",))
)
def test_the_longest_prompt_is_that_of_the_grid(name: str) -> None:
    [row] = [row for row in answer("32GB", 4096).models if row.name == name]
    sized = sized_as(row, "32GB", row.weight_bits)
    grid = estimate(sized, asked(4096).under(sized.runtime_model.runtime)).grid.rows[0]
    assert (row.context_tokens, row.context_step) == (grid.context_tokens, grid.context_step)


@some_and_all
@pytest.mark.parametrize(("machine", "tokens"), QUESTIONS[:2])
def test_more_bits_leave_less_room_and_no_larger_step_fits(
    machine: str, tokens: int, kept: tuple[LocalModel, ...]
) -> None:
    for row in answer(machine, tokens, kept).models:
        bits = (None, *weight_bits_of(sized_as(row, machine, None)))
        for more in bits[: bits.index(row.weight_bits)] if row.context_tokens else ():
            search = search_of_row(row, machine, tokens)
            longest = search.longest(replace(search.requested, weight_bits=more))
            assert longest.tokens < row.context_tokens, (row.name, more)
        for step in STEPS[: STEPS.index(row.prefill_step)]:
            sized = sized_as(row, machine, row.weight_bits)
            run = replace(asked(tokens).under(sized.runtime_model.runtime), prefill_step=step)
            verdict, _ = judge(sized.requirement(run), sized.device)
            assert verdict != "fits" or row.verdict == "exceeds", (row.name, step)


def search_of_row(row: Fit, machine: str, tokens: int) -> JointSearch:
    """The search for settings of a row's model."""
    sized = sized_as(row, machine, None)
    return search_of(sized, asked(tokens).under(sized.runtime_model.runtime))


def test_weights_have_at_least_four_bits() -> None:
    for machine, tokens in QUESTIONS:
        assert all((row.weight_bits or 4) >= 4 for row in answer(machine, tokens).models)


@pytest.mark.parametrize("sort", ["size", "context", "speed"])
def test_a_selection_has_the_first_rows_of_the_whole_list(sort: Sort) -> None:
    named = [each._replace(parameters=stated_parameters(Path(each.reference))) for each in SOME]
    whole = fits(CATALOG, named, DEVICES["m4-pro-24"], asked(4096), selection=Selection(sort=sort))
    cut = Selection(rows=3, sort=sort)
    some = fits(CATALOG, named, DEVICES["m4-pro-24"], asked(4096), selection=cut)
    fitting = [row.name for row in whole.models if row.verdict != "exceeds"]
    assert [row.name for row in some.models if row.verdict != "exceeds"] == fitting[:3]
    assert some.left_out == len(whole.models) - len(some.models)


def test_a_selection_leaves_out_what_has_less_room() -> None:
    cut = Selection(least_context=100_000)
    answer = fits(CATALOG, SOME, DEVICES["m4-pro-24"], asked(4096), selection=cut)
    rows = answer.models
    assert all(row.context_tokens >= 100_000 for row in rows if row.verdict != "exceeds")
    # Nothing lists them, so that --all is no advice.
    assert answer.left_out == 0
    assert answer.without_room == len(SOME) - len(rows) > 0
    for use, least in CONTEXT_OF_USE.items():
        assert Selection(use=use, least_context=100).context_tokens == max(least, 100)


@some_and_all
def test_what_does_not_fit_names_the_smallest_mac_that_does(kept: tuple[LocalModel, ...]) -> None:
    rows = [row for row in answer("32GB", 4096, kept).models if row.smallest_memory_bytes]
    assert rows
    for row in rows:
        assert row.verdict == "exceeds"
        sized = sized_as(row, "32GB", row.weight_bits)
        run = replace(asked(4096).under(sized.runtime_model.runtime), prefill_step=row.prefill_step)
        memory = row.smallest_memory_bytes or 0
        assert judge(sized.requirement(run), memory_device(memory))[0] == "fits"
    macs = [row.smallest_memory_bytes for row in rows]
    assert macs == sorted(macs, key=lambda memory: memory or 0)


def test_under_another_runtime_than_macs_have_no_mac_is_named() -> None:
    found = answer("rtx-4090", 4096, tuple(SOME[:4]))
    assert all(row.smallest_memory_bytes is None for row in found.models)


def test_every_model_is_a_step_of_the_progress() -> None:
    steps: list[int] = []

    class Counting:
        def begin(self, what: str, steps: int) -> None: ...
        def end(self) -> None: ...
        def request(self, request: FinishedRequest) -> None: ...
        def advance(self, steps: int = 1, seen: list[int] = steps) -> None:
            seen.append(steps)

    kept = [*KEPT[:2], LocalModel("none", "folder", "/none.json")]
    fits(CATALOG, kept, DEVICES["8GB"], asked(100), progress=Counting())
    assert steps == [1, 1, 1]
