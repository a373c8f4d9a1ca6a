"""Classes that only mlx-vlm has, on prompts of text: peaks and caches of runs on the CPU."""

from importlib.util import find_spec
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.images.plan import ImagePlan
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.kv_cache import kv_cache, state_bytes
from memfit.estimators.sizing.opening import size

pytest.importorskip("mlx_lm")
if find_spec("mlx_vlm") is None:  # its import takes seconds
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)
from memfit.estimators.trace.cache_stepper import undescribed
from memfit.estimators.trace.leaves import caches_of
from memfit.estimators.trace.vision_model import TracedVisionModel
from tests.selection import quick
from tests.trace.only_mlx_vlm import CONFIGS
from tests.trace.test_vision import HIGHEST, LOWEST, traced
from tests.trace.vision_cases import Case
from tests.trace.vision_runs import library, measured

# A cache whose class is not mlx-lm's.
OWN_CACHES = ("minimax_m3", "hy_v4", "deepseek_v4", "glm5_next", "qwen4_exp", "z1t")
# Without its kernels for Metal the class loops over tokens.
SHORT = ("glm5_next",)


def case_of(name: str) -> Case:
    # Products of experts are float32 alone on the CPU.
    tokens = 60 if name in SHORT else 700
    return Case(
        name, CONFIGS[name], ImagePlan((), ()), prefill_step=300, dtype="F32", text_tokens=tokens
    )


@pytest.mark.parametrize("name", quick(list(CONFIGS), ["minimax_m3", "hy_v4"]))
def test_a_text_prompt_takes_what_mlx_vlm_takes_and_leaves_the_described_caches(
    name: str,
) -> None:
    case = case_of(name)
    caches: list[Any] = []
    peak = measured(case, caches)
    assert LOWEST < traced(case).nbytes / peak < HIGHEST
    held = sum(leaf.array.nbytes for leaf in caches_of(caches))
    model = TracedVisionModel(case.config, "cpu", dtype=case.dtype).describe()
    workload = replace(case.workload, max_tokens=2)
    described = kv_cache(model, workload).nbytes + state_bytes(model, 1)
    # Some indices are narrower than the model's type.
    assert held <= described <= held * 1.02


@pytest.mark.parametrize("name", quick(OWN_CACHES, ["minimax_m3"]))
def test_a_long_prompt_is_estimated_by_trace(name: str) -> None:
    sized = size(
        Checkpoint("model", "local", CONFIGS[name], "config.json"), device=find_device("m5-max-128")
    )
    assert (sized.runtime, sized.runtime_model.source.method) == ("mlx-vlm", "trace")
    short, long = (sized.figures_for(Workload(prompt_tokens=n)) for n in (3000, 40_000))
    assert long.moment.nbytes > sized.resident_bytes
    if name != "z1t":  # it keeps states alone
        assert long.kv.nbytes > short.kv.nbytes


@pytest.mark.exhaustive
def test_a_model_of_full_size_is_traced_with_a_prompt_in_many_chunks() -> None:
    # All calls of a run take more slices together than a class without a loop takes in one.
    checkpoint = open_checkpoint("deepseek-ai/DeepSeek-V4-Flash")
    workload = Workload(prompt_tokens=32 * 1024)
    figures = size(checkpoint, device=find_device("m3-ultra-512")).figures_for(workload)
    assert 0 < figures.moment.workspace_bytes < 8 * 10**9


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OWN_CACHES)
def test_chunks_that_are_left_out_change_no_peak(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(name, CONFIGS[name], ImagePlan((), ()), prefill_step=128, text_tokens=1500)
    left_out = _metal_peak(case)
    monkeypatch.setattr("memfit.estimators.trace.vision_recorder._RECORDED_CHUNKS", 100)
    assert _metal_peak(case) == pytest.approx(left_out, rel=0.01)


def _metal_peak(case: Case) -> int:
    from memfit.estimators.mlx.versions import MLX_VERSION
    from memfit.estimators.trace.kernel_stubs import TraceTarget
    from memfit.estimators.trace.vision_peak import vision_peak

    model = TracedVisionModel(case.config, "metal")
    run = model.record(case.plan, case.workload, TraceTarget(backend="metal"))
    return vision_peak(run, model.weights, find_device("m5-max-128"), MLX_VERSION).nbytes


def test_a_cache_that_is_not_described_is_named() -> None:
    cache = library().load("mlx_vlm.models.cache").SimpleKVCache()
    with pytest.raises(UnsupportedError, match=r"^mlx_vlm\.models\.cache\.SimpleKVCache: the gr"):
        raise undescribed(cache)
