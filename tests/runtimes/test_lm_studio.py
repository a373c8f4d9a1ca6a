"""LM Studio's context fit, compared with what its engine logged and what its tests record."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.devices import find_device
from memfit.estimators.runtimes.lm_studio import RESERVE_BYTES, LmStudio, Profile, profile_of
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime
from tests.cli.running import Memfit

SAMPLES = Path(__file__).parents[2] / "sample_configs"
GIB = 1 << 30
QWEN_35B = Profile(20_480, 4_096, 32, 0, 64_389_120)
QWEN_27B = Profile(65_536, 10_240, 48, 0, 153_944_064)
GEMMA_26B = Profile(20_480, 5_632, 32, 204_800, 204_800 * 1023)
GEMMA_12B = Profile(16_384, 7_680, 32, 327_680, 327_680 * 1023)


def sized(name: str, device: str = "m3-pro-36") -> SizedModel:
    opened = open_checkpoint(str(SAMPLES / f"{name}.yaml"))
    text = size(opened, device=find_device(device), quantize=Quantization(4, 64))
    return with_runtime(text, get_runtime("lm-studio"))


@pytest.mark.parametrize(
    ("profile", "loaded_bytes", "tokens"),
    [  # mlx-engine, tests/test_batched_vision_context_fit.py: measured, on 27 GiB
        (QWEN_35B, 20_402_597_098, 58_880),
        (QWEN_27B, 16_055_717_354, 55_040),
        (GEMMA_26B, 15_611_655_610, 104_192),
        (GEMMA_12B, 10_990_079_092, 153_856),
        (GEMMA_12B, 12_718_509_172, 134_656),
    ],
)
def test_fitted_contexts_are_those_that_mlx_engine_records(
    profile: Profile, loaded_bytes: int, tokens: int
) -> None:
    assert profile.fitted(2048, 27 * GIB - RESERVE_BYTES - loaded_bytes, 256) == tokens


@pytest.mark.parametrize(
    ("profile", "ceiling", "loaded", "tokens"),
    [  # logged in hundredths of a GiB; lmstudio-bug-tracker 2191, 2240 and 2250
        (QWEN_35B, 3300, 2015, 152_576),
        (GEMMA_26B, 3444, 2604, 91_648),
        (QWEN_27B, 4884, 1495, 208_384),
    ],
)
def test_fitted_contexts_are_those_of_logs_of_lm_studio(
    profile: Profile, ceiling: int, loaded: int, tokens: int
) -> None:
    least, most = (
        profile.fitted(2048, (ceiling - loaded + rounding) * GIB // 100, 256)
        for rounding in (-1, 1)
    )
    assert least <= tokens <= most <= least + 1024


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("qwen3.6-35b-a3b", QWEN_35B),
        ("qwen3.6-27b", QWEN_27B),
        ("gemma-4-26b-a4b", GEMMA_26B),
        ("gemma-4-e2b", Profile(6_144, 20_992, 16, 12_288, 12_288 * 511)),
    ],
)
def test_profiles_follow_from_a_config_as_its_probe_measures_them(
    name: str, profile: Profile
) -> None:
    assert profile_of(sized(name).model) == profile


def test_gpt_oss_has_no_scores_and_other_caches_no_profile() -> None:
    fused = profile_of(sized("gpt-oss-20b").model)
    assert fused
    assert fused.scores == 0
    assert profile_of(sized("llama-4-scout", "m3-ultra-512").model) is None
    assert profile_of(sized("mamba-2.8b").model) is None


def test_a_long_prompt_is_computed_in_smaller_chunks_that_end_at_its_end() -> None:
    model = sized("qwen3.6-35b-a3b").runtime_model
    assert isinstance(model, LmStudio)
    workload = Workload(prompt_tokens=140_000)
    parts = list(model.segments(workload))
    assert [step for _, step in parts] == [2048, 1024, 512]
    assert [end for end, _ in parts][-1] == 140_000
    whole = model.figures(workload).moment.nbytes
    assert whole >= model.figures(replace(workload, prefill_step=512)).moment.nbytes
    assert list(model.segments(Workload(prompt_tokens=1000))) == [(1000, 2048)]


def test_what_its_fit_leaves_out_does_not_fit_and_says_what_it_predicts(memfit: Memfit) -> None:
    model = SAMPLES / "qwen3.6-35b-a3b.yaml"
    options = ("--quantize", "4", "--runtime", "lm-studio", "--device", "m3-pro-36")
    inside = memfit("estimate", model, *options, "--context", "150000", "--json")
    outside = memfit("estimate", model, *options, "--context", "200000", "--json")
    assert inside.json["verdict"] == "tight"
    assert outside.json["verdict"] == "exceeds"
    (note,) = [each for each in outside.json["notes"] if each["code"] == "context-fit"]
    assert "fits the context to 157952 tokens" in note["message"]
    assert "it predicts 28.7 GB" in note["message"]
