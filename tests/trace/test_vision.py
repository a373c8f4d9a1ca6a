"""Recorded prompts with images, compared with the peaks of mlx-vlm itself on the CPU."""

from importlib.util import find_spec
from typing import Any

import pytest

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MLX_VERSION
from memfit.estimators.trace.kernel_stubs import TraceTarget

pytest.importorskip("mlx_lm")
if find_spec("mlx_vlm") is None:  # its import takes seconds
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)
from memfit.estimators.trace.peak import RunPeak
from memfit.estimators.trace.vision_model import TracedVisionModel
from memfit.estimators.trace.vision_peak import VisionPart, vision_peak
from tests.trace.vision_cases import CASES, GEMMA3, GEMMA4, QWEN2_VL, TEXT, WIDE, Case, grid
from tests.trace.vision_runs import measured

HOST = Device("this host", "cpu", 0, 0, None, "flag")
# A run frees arrays early where the CPU is quicker than Python: the trace may be higher.
LOWEST, HIGHEST = 0.96, 1.15
QUICK = ("Qwen2-VL", "Gemma 3, text")


def traced(case: Case) -> RunPeak[VisionPart]:
    model = TracedVisionModel(case.config, "cpu", dtype=case.dtype)
    run = model.record(case.plan, case.workload, TraceTarget(backend="cpu"))
    return vision_peak(run, model.weights, HOST, MLX_VERSION)


def _marked(case: Case) -> Any:
    marks = () if case.name in QUICK else (pytest.mark.exhaustive,)
    return pytest.param(case, id=case.name, marks=marks)


# A class that converts a weight to NumPy, and one that lengthens the prompt; more are in
# benchmarks/image_accuracy.py.
MORE = [case for case in WIDE if case.name in ("LLaVA-NeXT", "nanoLLaVA")]


# Of mlx-vlm's batch_generate; the last takes the most while its text is prefilled.
BATCHES = [
    case._replace(name=f"{case.name}, batch of 3", batch=3)
    for case in (CASES[0], CASES[5], TEXT[0])
]


@pytest.mark.parametrize("case", [*map(_marked, (*CASES, GEMMA4, *TEXT, *MORE, *BATCHES))])
def test_a_prompt_takes_what_mlx_vlm_takes(case: Case) -> None:
    assert LOWEST < traced(case).nbytes / measured(case) < HIGHEST


def test_the_largest_part_of_a_large_image_is_the_tower() -> None:
    small = traced(Case("small", QWEN2_VL, grid(56, 56, 14), text_tokens=800))
    large = traced(Case("large", QWEN2_VL, grid(896, 896, 14)))
    assert (small.top.part, large.top.part) == ("prefill", "vision")
    assert large.parts["decode"] < large.nbytes == large.parts["vision"]


@pytest.mark.parametrize("name", ["LLaVA-OneVision", "DeepSeek-VL2", "GLM-4V"])
def test_classes_get_what_processors_and_transformers_give_them(name: str) -> None:
    # Resolutions of a list, a mask of the tokens that features replace, one of two ids of them.
    (case,) = (case for case in WIDE if case.name == name)
    assert traced(case).top.part == "vision"


def test_a_config_with_code_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="model_file: the model brings its own code"):
        TracedVisionModel({**GEMMA3, "model_file": "model.py"}, "cpu")


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"config\.json: .*'no_such_class'"):
        TracedVisionModel({"model_type": "no_such_class"}, "cpu")
