"""Runs that do not fit are rejected before loading, and the error says what would fit."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device, free_bytes
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.preflight import RefusedError, obstacle, require_room
from tests.checkpoints import Checkpoints
from tests.models import QWEN3_4B, write_config

GB = 10**9
WORKLOAD = Workload(prompt_tokens=16_384, max_tokens=32)
# 8.0 GB of weights in 16 bits, and 2.4 GB of cache for this workload.
DEVICE = Device("a Mac", "metal", 64 * GB, 50 * GB, 30 * GB, "detected", "s", 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("refusal") / "qwen3-4b", QWEN3_4B)


def on(model: Path, **changes: Any) -> SizedModel:
    return size(open_checkpoint(str(model)), device=replace(DEVICE, **changes), margin_bytes=GB)


def test_a_run_that_fits_is_allowed(model: Path) -> None:
    assert obstacle(on(model), WORKLOAD) is None
    require_room(on(model), WORKLOAD)


def test_memory_in_use_by_others_is_not_free(model: Path) -> None:
    sized = on(model, used_by_others_bytes=60 * GB)
    needed = format_bytes(sized.requirement(WORKLOAD).peak_bytes)
    reason = f"estimated to need {needed}, and 4.0 GB of 64.0 GB are free"
    assert obstacle(sized, WORKLOAD) == reason


def test_exactly_the_needed_memory_is_enough(model: Path) -> None:
    need = on(model).requirement(WORKLOAD).peak_bytes
    exactly = on(model, memory_bytes=need, working_set_bytes=need)
    assert free_bytes(DEVICE) == 64 * GB
    assert obstacle(exactly, WORKLOAD) is None
    short = on(model, memory_bytes=need, working_set_bytes=need - 1)
    assert "working set" in str(obstacle(short, WORKLOAD))
    one_more = on(model, memory_bytes=need, working_set_bytes=need, used_by_others_bytes=1)
    assert "are free" in str(obstacle(one_more, WORKLOAD))


def test_one_allocation_may_be_too_large(model: Path) -> None:
    reason = str(obstacle(on(model, max_buffer_bytes=10_000_000), WORKLOAD))
    assert "one allocation" in reason
    assert "above 10.0 MB" in reason


def test_a_rejection_states_which_prompt_would_fit(model: Path) -> None:
    sized = on(model, working_set_bytes=11 * GB)
    with pytest.raises(RefusedError, match=r"a prompt of \d+ tokens .*would fit") as error:
        require_room(sized, WORKLOAD)
    shorter = int(str(error.value).partition("a prompt of ")[2].split()[0])
    assert shorter % 256 == 0
    require_room(sized, Workload(prompt_tokens=shorter))


def test_a_rejection_states_when_no_prompt_would_fit(model: Path) -> None:
    with pytest.raises(RefusedError, match="no setting makes it fit"):
        require_room(on(model, working_set_bytes=8 * GB), WORKLOAD)


def test_a_run_mlx_lm_does_not_support_is_unsupported_not_rejected(
    checkpoints: Checkpoints,
) -> None:
    sliding = on(checkpoints("sliding"))
    quantised = replace(WORKLOAD, kv_bits=8, quantized_kv_start=0)
    assert "rotating" in str(obstacle(sliding, quantised))
    with pytest.raises(UnsupportedError, match="rotating"):
        require_room(sliding, quantised)
