"""mlx-vlm with images by trace: what estimates get from it, and where it cannot run."""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.images.processor import with_image_tokens
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.kernels import allocated
from memfit.estimators.runtimes.facets import loaded_weights
from memfit.estimators.runtimes.mlx_vlm_trace import MlxVlmTrace
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.opening import size, with_weight_bits
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime

pytest.importorskip("mlx_lm")
if find_spec("mlx_vlm") is None:  # its import takes seconds
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)
from memfit.estimators.trace.vision_builder import made
from memfit.estimators.trace.vision_inputs import inputs
from tests.arch.test_wrappers import LLAVA_1_5_7B
from tests.trace.vision_cases import CASES, GEMMA3N, QWEN3_VL, WIDE, Case
from tests.trace.vision_runs import library

SAMPLES = Path(__file__).parents[2] / "sample_configs"
TOWERS = ("GLM-4V", "GLM-4V, experts", "GLM-OCR", "InternVL (chat)", "Llama 3.2 Vision", "Gemma 3n")
METHODS: tuple[MethodSetting, ...] = ("formula", "trace")
PHOTO = Images(images=(ImageSize(width=560, height=448),))
SCREENSHOT = Images(images=(ImageSize(width=1280, height=800),))


def by_trace(config: dict[str, Any], images: Images = SCREENSHOT) -> tuple[SizedModel, Workload]:
    checkpoint = Checkpoint("model", "local", config, "config.json")
    sized = size(checkpoint, device=find_device("m5-max-128"), method="trace")
    asked = Workload(prompt_tokens=2000, images=images)
    return with_runtime(sized, get_runtime("mlx-vlm")), with_image_tokens(checkpoint, asked)


def test_a_screenshot_is_traced_and_below_the_bound() -> None:
    sized, workload = by_trace(QWEN3_VL)
    figures, bound = sized.figures_for(workload), sized.formula_view().figures_for(workload)
    assert sized.runtime_model.basis("workspace", workload)[0] == "traced"
    assert figures.moment.phase == "vision"
    assert sized.resident_bytes < figures.moment.nbytes < bound.moment.nbytes
    assert figures.kv == bound.kv
    said = sized.runtime_model.statements(workload, figures)
    assert not list(said.notes)
    assert any("traced with mlx" in each for each in said.assumptions)


def test_what_is_not_traced_is_bounded_and_says_so() -> None:
    sized, workload = by_trace(QWEN3_VL, Images(images=(ImageSize(28, 28, 1000),)))
    figures = sized.figures_for(workload)
    assert sized.runtime_model.basis("workspace", workload)[0] == "bound"
    said = sized.runtime_model.statements(workload, figures)
    notes = {note.code: note.message for note in said.notes}
    assert "the class loops" in notes["not-traced"]


def test_a_batch_is_traced_and_below_the_bound() -> None:
    sized, one = by_trace(QWEN3_VL)
    batch = replace(one, batch=3, max_tokens=700)
    figures, bound = sized.figures_for(batch), sized.formula_view().figures_for(batch)
    assert sized.runtime_model.basis("workspace", batch)[0] == "traced"
    assert figures.kv == bound.kv
    single = sized.figures_for(one).moment.nbytes
    assert single < figures.moment.nbytes < bound.moment.nbytes
    packed = replace(batch, kv_bits=4, quantized_kv_start=0)
    assert sized.figures_for(packed).moment.nbytes > sized.resident_bytes
    with pytest.raises(UnsupportedError, match="leave out KV bits, or take method trace"):
        sized.formula_view().figures_for(packed)
    with pytest.raises(UnsupportedError, match="leave out max_kv_size, or batch"):
        sized.figures_for(replace(batch, max_kv_size=512))


@pytest.mark.exhaustive
def test_the_tower_of_mistral_3_is_bounded() -> None:
    sized, workload = by_trace(next(case.config for case in WIDE if case.name == "Mistral 3"))
    bound = sized.formula_view().figures_for(workload).moment.nbytes
    assert sized.figures_for(workload).moment.nbytes < bound


def test_a_model_without_a_tower_is_refused() -> None:
    config = {key: value for key, value in QWEN3_VL.items() if key != "vision_config"}
    sized, workload = by_trace(config)
    with pytest.raises(UnsupportedError, match="no vision tower"):
        sized.figures_for(workload)


IDEFICS = next(case.config for case in WIDE if case.name == "Idefics3")


def test_a_class_that_only_mlx_vlm_has_is_sized_by_it() -> None:
    checkpoint = Checkpoint("model", "local", IDEFICS, "config.json")
    sized = size(checkpoint, device=find_device("m5-max-128"))
    runtime_model = sized.runtime_model
    assert (sized.runtime, runtime_model.source.method) == ("mlx-vlm", "trace")
    text = Workload(prompt_tokens=3000, max_tokens=600)
    figures = sized.figures_for(text)
    # Two layers of keys and values, of two heads of 64, in bf16, for 3600 tokens in steps of 256.
    assert figures.kv.nbytes == 2 * 2 * 2 * 64 * 2 * 3840
    images = with_image_tokens(checkpoint, replace(text, images=SCREENSHOT))
    seen = sized.figures_for(images)
    assert seen.kv.nbytes > figures.kv.nbytes
    assert seen.moment.nbytes > figures.moment.nbytes
    assert sized.runtime_model.basis("workspace", images)[0] == "traced"
    # A matrix of 4 bits has a scale and a bias of 16 bits for each 64; the towers stay.
    fewer = size(checkpoint, device=None, quantize=Quantization(4, 64))
    towers = loaded_weights(runtime_model).loaded_bytes - sized.footprint.loaded_bytes
    assert (
        towers
        == loaded_weights(fewer.runtime_model).loaded_bytes - fewer.footprint.loaded_bytes
        > 0
    )
    assert fewer.footprint.loaded_bytes * 3 < sized.footprint.loaded_bytes
    assert with_weight_bits(sized, 4).resident_bytes == fewer.resident_bytes


def test_between_traced_prompts_the_images_are_counted_too() -> None:
    checkpoint = Checkpoint("model", "local", IDEFICS, "config.json")
    sized = size(checkpoint, device=find_device("m5-max-128"))
    asked = Workload(prompt_tokens=20_000, images=SCREENSHOT)
    workload = with_image_tokens(checkpoint, asked)
    traced = sized.figures_for(workload).moment.nbytes
    between = sized.formula_view().figures_for(workload).moment.nbytes
    assert traced <= between < traced + (traced - sized.resident_bytes) // 8


def test_a_prompt_without_trace_or_formula_is_refused_once() -> None:
    sized = size(Checkpoint("model", "local", IDEFICS, "config.json"), device=None)
    with pytest.raises(UnsupportedError, match=r"^mlx-vlm's batches [^;]*leave out max_kv_size"):
        sized.figures_for(Workload(prompt_tokens=100, batch=2, max_kv_size=64))


def test_mlx_lm_has_no_class_for_it() -> None:
    checkpoint = Checkpoint("model", "local", IDEFICS, "config.json")
    sized = size(checkpoint, device=None)
    with pytest.raises(UnsupportedError, match="mlx-lm has no class for model_type idefics3"):
        with_runtime(sized, get_runtime("mlx-lm"))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("yolo11", "a model of images, not a language model"),
        ("sam3_1", "mlx-vlm's class for model_type sam3_1 has no language model"),
    ],
)
def test_what_generates_no_text_is_refused(model_type: str, reason: str) -> None:
    checkpoint = Checkpoint("model", "local", {"model_type": model_type}, "config.json")
    with pytest.raises(UnsupportedError, match=reason):
        size(checkpoint, device=None)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(
    "name", ["qwen3-vl-4b", pytest.param("gemma-3-4b", marks=pytest.mark.exhaustive)]
)
def test_weights_by_formula_are_those_of_mlx_vlms_class(name: str, bits: int | None) -> None:
    checkpoint = open_checkpoint(str(SAMPLES / f"{name}.yaml"))
    quantize = Quantization(bits, 64) if bits else None
    sized = size(checkpoint, device=None, quantize=quantize, method="trace")
    runtime_model = with_runtime(sized, get_runtime("mlx-vlm")).runtime_model
    assert isinstance(runtime_model, MlxVlmTrace)
    weights = runtime_model.trace.weights(None)
    assert loaded_weights(runtime_model).loaded_bytes == sum(weights.values())


def test_images_of_a_model_without_a_formula_are_traced_unless_a_formula_is_asked_for() -> None:
    llava = next(case.config for case in WIDE if case.name == "LLaVA")
    # LLaVA's family reads the vocabulary of the text's section, and has no tower of SigLIP.
    config = {key: value for key, value in llava.items() if key != "vocab_size"}
    config["vision_config"] = {**llava["vision_config"], "model_type": "siglip_vision_model"}
    checkpoint = Checkpoint("model", "local", config, "config.json")
    workload = with_image_tokens(checkpoint, Workload(prompt_tokens=500, images=SCREENSHOT))
    sized = with_runtime(size(checkpoint, device=None), get_runtime("mlx-vlm"))
    assert sized.runtime_model.basis("workspace", workload)[0] == "traced"
    formula = with_runtime(size(checkpoint, device=None, method="formula"), get_runtime("mlx-vlm"))
    with pytest.raises(UnsupportedError, match="no formula has its vision tower"):
        formula.figures_for(workload)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TOWERS)
def test_the_work_of_a_tower_by_formula_is_a_bound_on_the_trace(name: str) -> None:
    (case,) = (case for case in (*WIDE, GEMMA3N) if case.name == name)
    checkpoint = Checkpoint("model", "local", case.config, "config.json")
    workload = with_image_tokens(checkpoint, Workload(prompt_tokens=30, images=PHOTO))
    device, runtime = find_device("m4-max-64"), get_runtime("mlx-vlm")
    formula, traced = (
        with_runtime(size(checkpoint, device=device, method=method), runtime) for method in METHODS
    )
    assert formula.resident_bytes == traced.resident_bytes
    bound, peak = (each.figures_for(workload) for each in (formula, traced))
    assert bound.kv == peak.kv
    assert peak.moment.nbytes <= bound.moment.nbytes < peak.moment.nbytes * 1.5
    largest = allocated(bound.moment.largest_buffer_bytes, "metal")
    assert peak.moment.largest_buffer_bytes <= largest


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 4])
def test_the_tower_of_llava_by_formula_is_a_near_bound_on_the_trace(count: int) -> None:
    checkpoint = Checkpoint("model", "local", LLAVA_1_5_7B, "config.json")
    images = Images(images=(ImageSize(width=640, height=480, count=count),))
    workload = with_image_tokens(checkpoint, Workload(prompt_tokens=200, images=images))
    device = find_device("m4-max-64")
    runtime = get_runtime("mlx-vlm")
    formula = with_runtime(size(checkpoint, device=device, method="formula"), runtime)
    traced = with_runtime(size(checkpoint, device=device, method="trace"), runtime)
    assert formula.resident_bytes == traced.resident_bytes
    bound, peak = (each.figures_for(workload).moment.nbytes for each in (formula, traced))
    assert peak <= bound < peak * 1.02


WIDE_CACHES = ("PaliGemma", "Hunyuan-VL", "nanoLLaVA", "Llama 3.2 Vision")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*WIDE_CACHES, "LLaVA"])
def test_caches_after_images_have_the_type_that_the_class_makes(name: str) -> None:
    config = next(case.config for case in (*CASES, *WIDE) if case.name == name)
    sized, workload = by_trace(config, PHOTO)
    with_images, text = (
        sized.figures_for(each) for each in (workload, replace(workload, images=UNSET))
    )
    widths = 2 if name in WIDE_CACHES else 1
    assert with_images.kv.nbytes == widths * text.kv.nbytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in WIDE if case.name in WIDE_CACHES[:3]])
def test_caches_after_images_are_float32_when_it_runs(case: Case) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    load = library().load
    model = made(load("mlx_vlm.utils"), load("mlx.nn"), copy.deepcopy(case.config), "BF16")
    given = inputs(model, case.plan, case.workload)
    caches = load("mlx_vlm.models.cache").make_prompt_cache(model.language_model)
    tokens, pixels = given.pop("input_ids"), given.pop("pixel_values")
    steps = load("mlx_vlm.generate.ar").generate_step(
        tokens,
        model,
        pixels,
        given.pop("attention_mask"),
        max_tokens=2,
        prompt_cache=caches,
        **given,
    )
    for _ in steps:
        pass
    held = [array for each in caches for _, array in tree_flatten(each.state)]
    assert {array.dtype for array in held if isinstance(array, mx.array)} == {mx.float32}
