"""A trace of few calls has the need of the whole run."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.local.directory import read_directory
from memfit.estimators.machine.devices import working_set_device
from memfit.estimators.mlx.call_plan import CHUNKS
from memfit.estimators.runtimes.mlx_lm_trace import MlxLmTrace
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.trace_search import lower_calls, peak_view
from tests.selection import quick

pytest.importorskip("mlx_lm")

CASES = sorted((Path(__file__).parents[1] / "arch" / "cases").glob("*.json"))
# The last chunk is whole but for one token, nearly as long, and short.
WORKLOADS = (
    Workload(prompt_tokens=512, prefill_step=128),
    Workload(prompt_tokens=512, prefill_step=128, max_tokens=9, kv_bits=4, quantized_kv_start=0),
    Workload(prompt_tokens=700, prefill_step=256),
    Workload(prompt_tokens=1088, prefill_step=512),
)


@pytest.mark.parametrize("path", quick(CASES), ids=lambda path: path.stem)
def test_a_trace_of_few_calls_has_the_need_of_the_whole_run(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    sized = size(read_directory(tmp_path), device=working_set_device(10**12), method="trace")
    formula = sized.formula_view()
    for workload in WORKLOADS:
        try:
            formula.figures_for(workload)
        except UnsupportedError:  # KV bits, by the caches of some classes
            continue
        # First the view: afterwards the whole run is known.
        view = peak_view(sized, formula, workload)
        assert view.requirement(workload) == sized.requirement(workload)


def test_a_chunk_that_may_take_less_is_left_out_once_the_others_are_traced(tmp_path: Path) -> None:
    case = next(path for path in CASES if path.stem == "llama")
    (tmp_path / "config.json").write_bytes(case.read_bytes())
    sized = size(read_directory(tmp_path), device=working_set_device(10**12), method="trace")
    formula, workload = sized.formula_view(), Workload(prompt_tokens=5376, prefill_step=1024)
    assert "last_chunk" not in lower_calls(formula, workload)
    view = peak_view(sized, formula, workload)
    traced = view.runtime_model
    assert isinstance(traced, MlxLmTrace)
    assert "last_chunk" not in traced.trace.phases
    assert view.requirement(workload) == sized.requirement(workload)


def test_of_a_quantised_cache_the_first_chunk_is_left_out_where_it_takes_less(
    tmp_path: Path,
) -> None:
    case = next(path for path in CASES if path.stem == "llama")
    (tmp_path / "config.json").write_bytes(case.read_bytes())
    sized = size(read_directory(tmp_path), device=working_set_device(10**12), method="trace")
    asked = Workload(prompt_tokens=5376, prefill_step=1024, kv_bits=4, quantized_kv_start=0)
    formula, low = sized.formula_view(), {"first_chunk", "last_token", "decode", "growing"}
    assert low <= lower_calls(formula, asked)
    # Of a cache that is quantised on the way the formula follows other chunks than the trace.
    later = replace(asked, quantized_kv_start=2000)
    assert lower_calls(formula, later).isdisjoint(CHUNKS)
    for workload in (asked, later):
        view = peak_view(sized, formula, workload)
        assert view.requirement(workload) == sized.requirement(workload)
