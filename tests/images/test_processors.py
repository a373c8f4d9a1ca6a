"""Tokens and arrays of images equal those of mlx-vlm's own processors."""

from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.images import Images, ImageSize, VideoSize
from tests.images.processors import Case, loaded, planned, save

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids")

SIZES = ((640, 480), (300, 1000), (1, 1), (57, 29), (2000, 130))
QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN_WORDS = ("<|vision_start|>", "<|vision_end|>")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
GEMMA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
CASES = {
    "qwen2_vl": Case(
        {"model_type": "qwen2_vl"},
        QWEN_IMAGE,
        QWEN_VIDEO,
        {"min_pixels": 3136, "max_pixels": 200_000, "patch_size": 14, "merge_size": 2},
        named=QWEN,
        words=QWEN_WORDS,
    ),
    "qwen2_5_vl": Case(
        {"model_type": "qwen2_5_vl"},
        QWEN_IMAGE,
        QWEN_VIDEO,
        {"min_pixels": 3136, "max_pixels": 12_845_056, "temporal_patch_size": 2},
        named=QWEN,
        words=QWEN_WORDS,
    ),
    "qwen3_vl": Case(
        {"model_type": "qwen3_vl"},
        QWEN_IMAGE,
        QWEN_VIDEO,
        {"size": {"shortest_edge": 65536, "longest_edge": 300_000}, "patch_size": 16},
        video={"size": {"shortest_edge": 4096, "longest_edge": 600_000}, "patch_size": 16},
        named=QWEN,
        words=QWEN_WORDS,
    ),
    "gemma3": Case(
        {"model_type": "gemma3"},
        "<start_of_image>",
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 112, "width": 112},
        },
        processor={"image_seq_length": 16},
        named=GEMMA,
        words=("\n\n",),
    ),
    "pixtral": Case(
        {"model_type": "pixtral"},
        "[IMG]",
        preprocessor={"size": {"longest_edge": 512}, "patch_size": {"height": 16, "width": 16}},
        processor={"patch_size": 16},
        words=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "mistral3": Case(
        {"model_type": "mistral3"},
        "[IMG]",
        preprocessor={"size": {"longest_edge": 770}, "patch_size": 14},
        processor={"patch_size": 14, "spatial_merge_size": 2},
        words=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "gemma4": Case(
        {"model_type": "gemma4"},
        "<image_soft_token>",
        processor={"image_processor": {"max_soft_tokens": 70}},
        named=GEMMA,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_images_are_as_the_models_own_processor_makes_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    processor = loaded(save(case, tmp_path))
    for width, height in SIZES:
        check(processor, case, tmp_path, Images((ImageSize(width, height),)))
    check(processor, case, tmp_path, Images((ImageSize(640, 480), ImageSize(300, 200, 2))))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.video_prompt])
def test_videos_are_as_the_models_own_processor_makes_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    processor = loaded(save(case, tmp_path))
    for video in (VideoSize(5, 320, 200), VideoSize(1, 64, 64), VideoSize(12, 500, 300)):
        check(processor, case, tmp_path, Images(videos=(video,)))


def check(processor: Any, case: Case, directory: Path, asked: Images) -> None:
    """Compare one call of the processor, or its refusal, with the plan."""
    images = [Image.new("RGB", (size.width, size.height)) for size in asked.each_image()]
    videos = [np.zeros((v.frames, 3, v.height, v.width), np.uint8) for v in asked.videos]
    given = {"images": images} if images else {"videos": videos}
    text = case.prompt * len(images) + case.video_prompt * len(videos)
    try:
        made = processor(text=text, **given)
    except ValueError:
        with pytest.raises(InputError):
            planned(directory, asked)
        return
    plan = planned(directory, asked)
    assert plan.token_count == made["input_ids"].shape[1]
    expected = {name: made[name] for name in made if name not in OF_TEXT}
    assert expected.keys() == {array.name for array in plan.arrays}
    for name, value in expected.items():
        arrays = [array for array in plan.arrays if array.name == name]
        values = value if isinstance(value, list) else [value]
        assert [array.shape for array in arrays] == [tuple(each.shape) for each in values]
        assert {a.dtype for a in arrays} == {str(v.dtype).rpartition(".")[2] for v in values}
        for array, each in zip(arrays, values, strict=True):
            assert not array.values or np.array(each).tolist() == np.array(array.values).tolist()
