"""Prefill steps that fall with the position: mlx's own run, and what each part promises."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.results.advice import StepSchedule
from memfit.estimators.runtimes.mlx_lm import MLX_LM
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.search import fits_comfortably
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.sizing.step_schedule import step_schedule
from memfit.estimators.weights.derived import derive
from memfit.estimators.workspace.peak import ERROR_PERCENT, peak

CASES = Path(__file__).parents[1] / "arch" / "cases"
HOST = Device("this host", "cpu", 0, 0, None, "flag")
PARTS = ((1024, 512), (1536, 256), (1801, 128))
MOST = 131072


def sized(model: str, gib: int) -> SizedModel:
    return Catalog().sized(model, device=memory_device(gib * 2**30), runtime=MLX_LM)


@pytest.mark.exhaustive(daily=True)
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text", "qwen3_5"])
def test_a_run_takes_no_more_than_its_parts_with_one_step_each(case: str) -> None:
    pytest.importorskip("mlx_lm", reason="the truth is MLX itself")
    import mlx.core as mx

    if mx.metal.is_available() or mx.default_device() == mx.gpu:
        pytest.skip("the cases are of the CPU backend")
    config = json.loads((CASES / f"{case}.json").read_text())
    model = build_model(config, case)
    weights = derive(model, None).loaded_bytes
    parts = [
        peak(
            model,
            Workload(prompt_tokens=end + 1, prefill_step=step),
            resident_bytes=weights,
            plan=None,
            device=HOST,
        )
        for end, step in PARTS
    ]
    largest = max(parts, key=lambda moment: moment.nbytes)
    error = largest.workspace_bytes * ERROR_PERCENT // 100
    assert _measured(config) <= largest.nbytes - weights + error


def _measured(config: dict[str, Any]) -> int:
    """The most above the weights, of three runs: others on the machine free buffers sooner."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from tests.mlx_memory import settled_bytes
    from tests.oracle import Oracle

    model = Oracle(config).model
    mx.eval(model.parameters())
    peaks = []
    for _ in range(3):
        before, caches, position = settled_bytes(), make_prompt_cache(model), 0
        for end, step in PARTS:
            while position < end:
                chunk = min(step, end - position)
                model(mx.zeros((1, chunk), mx.int32), cache=caches)
                mx.eval([cache.state for cache in caches])
                mx.clear_cache()
                position += chunk
        peaks.append(int(mx.get_peak_memory()) - before)
        del caches
    return max(peaks)


def found_for(model: str, gib: int, **settings: Any) -> StepSchedule | None:
    return step_schedule(sized(model, gib), Workload(prompt_tokens=4096, **settings), MOST)


@pytest.mark.parametrize(("model", "gib"), [("qwen3-0.6b", 8), ("gemma-3-4b", 16)])
def test_every_part_fits_and_a_larger_step_does_not_reach_the_next(model: str, gib: int) -> None:
    found, machine = found_for(model, gib), sized(model, gib)
    assert found is not None
    ends, steps = zip(*found.steps, strict=True)
    assert list(ends) == sorted(set(ends))
    assert list(steps) == sorted(set(steps), reverse=True)
    first = found.context_with_first_step
    assert found.context_tokens == ends[-1] > first >= ends[0]
    assert not fits_comfortably(machine, Workload(prompt_tokens=first + 256))
    for end, step in found.steps[:-1]:
        assert end % step == 0
        # With its last chunk whole, and one more does not fit.
        assert fits_comfortably(machine, Workload(prompt_tokens=end + 1, prefill_step=step))
    assert not fits_comfortably(machine, Workload(prompt_tokens=ends[0] + steps[0] + 1))
    longest = Workload(prompt_tokens=ends[-1], prefill_step=steps[-1])
    assert fits_comfortably(machine, longest)
    assert found.chunks < found.chunks_with_last_step
    assert found.needed_bytes <= machine.device.working_set_bytes if machine.device else False


def test_there_is_none_where_one_step_is_enough_or_mlx_lm_runs_several() -> None:
    assert found_for("qwen3-0.6b", 64) is None
    assert found_for("qwen3-0.6b", 8, batch=2) is None
    assert found_for("qwen3-0.6b", 8, prefill_step=128) is None
    without = Catalog().sized("qwen3-0.6b", runtime=MLX_LM)
    assert step_schedule(without, Workload(prompt_tokens=4096), MOST) is None


def test_the_seconds_are_said_where_the_chip_is_known() -> None:
    known = Catalog().sized("qwen3-4b-4bit", device=find_device("m1-8"), runtime=MLX_LM)
    found = step_schedule(known, Workload(prompt_tokens=4096), MOST)
    assert found is not None
    assert found.seconds is not None
    assert found.seconds_with_last_step is not None
    unknown = found_for("qwen3-0.6b", 8)
    assert unknown is not None
    assert unknown.seconds is None
