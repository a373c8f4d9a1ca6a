"""Tokens and arrays of images equal those of mlx-vlm's own processors."""

from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.images import Images, ImageSize, VideoSize
from tests.images.processors import Case, loaded, planned, save

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")
# Of the text, of both, or no array.
OF_TEXT = (
    "input_ids",
    "attention_mask",
    "mm_token_type_ids",
    "token_type_ids",
    "image_token_id",
    "labels",
    "_grid_shapes",
    "cross_attention_mask",
    "image_token_index",
    "num_image_tokens",
    "num_soft_tokens_per_image",
    "position_ids",
    "imgs_pos",
    "video_second_per_grid",
    "images_seq_mask",
    "num_patches_list",
    "seq_lens",
    "sft_format",
)

SIZES = ((320, 240), (150, 500), (1, 1), (57, 29), (1000, 65))
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
TAGS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 11) for column in range(1, 11))
GRID = {"size": {"shortest_edge": 65536, "longest_edge": 300_000}, "patch_size": 16}
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
        GRID,
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
    "qwen3_5": Case(
        {"model_type": "qwen3_5"}, QWEN_IMAGE, preprocessor=GRID, named=QWEN, words=QWEN_WORDS
    ),
    "glm4v": Case(
        {"model_type": "glm4v"},
        "<|begin_of_image|><|image|><|end_of_image|>",
        preprocessor={
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 12544, "longest_edge": 900_000},
        },
        named={"image_token": "<|image|>"},
        words=("<|begin_of_image|>", "<|end_of_image|>"),
    ),
    "glm_ocr": Case(
        {"model_type": "glm_ocr"},
        "<|begin_of_image|><|image|><|end_of_image|>",
        processor={"image_processor": {"size": {"longest_edge": 900_000}}},
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
        words=("<|begin_of_image|>", "<|end_of_image|>"),
    ),
    "dots_ocr": Case(
        {"model_type": "dots_ocr"},
        "<|img|><|imgpad|><|endofimg|>",
        preprocessor={
            **{"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 1},
            **{"min_pixels": 3136, "max_pixels": 300_000, "patch_size": 14, "merge_size": 2},
        },
        named={"image_token": "<|imgpad|>", "video_token": "<|video_pad|>"},
        words=("<|img|>", "<|endofimg|>"),
    ),
    "gemma3n": Case(
        {"model_type": "gemma3n"},
        "<image_soft_token>",
        preprocessor={
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 128, "width": 128},
        },
        processor={"image_seq_length": 16},
        named=GEMMA,
        words=("\n\n",),
    ),
    "idefics3": Case(
        {"model_type": "idefics3"},
        preprocessor={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 364},
            "max_image_size": {"longest_edge": 91},
        },
        processor={"image_seq_len": 7},
        words=("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
    ),
    "smolvlm": Case(
        {"model_type": "smolvlm"},
        preprocessor={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 512},
            "max_image_size": {"longest_edge": 128},
        },
        processor={"image_seq_len": 9},
        words=("<fake_token_around_image>", "<image>", "<global-img>", *TAGS),
    ),
    "llava": Case(
        {"model_type": "llava"},
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 112},
            "crop_size": {"height": 112, "width": 112},
        },
        processor={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        words=("<image>",),
    ),
    "llava_next": Case(
        {"model_type": "llava_next"},
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
        },
        processor={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        words=("<image>",),
    ),
    "mllama": Case(
        {"model_type": "mllama"},
        "<|image|>",
        preprocessor={
            "image_processor_type": "MllamaImageProcessor",
            "size": {"height": 56, "width": 56},
            "max_image_tiles": 4,
        },
        others=1,
        words=("<|image|>", "<|python_tag|>"),
    ),
    "phi3_v": Case({"model_type": "phi3_v"}, "<|image_{}|>"),
    "kimi_vl": Case(
        {"model_type": "kimi_vl", "text_config": {}, "vision_config": {"patch_size": 14}},
        "<|media_pad|>",
        words=("<|media_pad|>",),
    ),
    "lfm2_vl": Case(
        {"model_type": "lfm2_vl"},
        preprocessor={"tile_size": 128, "max_image_tokens": 32, "min_image_tokens": 8},
        named={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        words=tuple(tag.replace("<", "<|img_").replace(">", "|>") for tag in TAGS),
    ),
    "paligemma": Case(
        {"model_type": "paligemma"},
        preprocessor={
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_seq_length": 16,
        },
        others=2,
        words=("<image>",),
    ),
    "internvl_chat": Case(
        {
            **{"model_type": "internvl_chat", "force_image_size": 56, "downsample_ratio": 0.5},
            **{"max_dynamic_patch": 7, "vision_config": {"image_size": 112, "patch_size": 14}},
        },
        words=("<img>", "</img>", "<IMG_CONTEXT>"),
    ),
    "internvl": Case(
        {
            "model_type": "internvl",
            "vision_config": {"model_type": "internvl_vision", "image_size": [56, 56]},
        },
        "<IMG_CONTEXT>",
        processor={"image_seq_length": 5},
        words=("<img>", "</img>", "<IMG_CONTEXT>"),
    ),
    "llava_onevision": Case(
        {"model_type": "llava_onevision", "vision_aspect_ratio": "anyres_max_3"},
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56 * h, 56 * w] for h in range(1, 4) for w in range(1, 4)],
        },
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        words=("<image>",),
    ),
    "deepseek_vl_v2": Case(
        {"model_type": "deepseek_vl_v2"},
        processor={
            **{"patch_size": 14, "downsample_ratio": 2},
            "candidate_resolutions": [[70, 70], [70, 140], [140, 70], [210, 70], [140, 140]],
        },
        others=1,
        words=("<image>",),
    ),
    "llama4": Case(
        {"model_type": "llama4"},
        "<|image|>",
        preprocessor={"size": {"height": 56, "width": 56}, "max_patches": 3},
        words=(
            *("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
    ),
    "molmo": Case(
        {"model_type": "molmo"},
        " ",
        preprocessor={"max_crops": 5},
        others=1,
        takes_one=True,
        words=("<im_patch>", "<im_col>", "<im_start>", "<im_end>"),
    ),
    "step3p7": Case(
        {"model_type": "step3p7"},
        "<im_patch>",
        one_mark=True,
        words=(
            *("<im_patch>", "<im_start>", "<im_end>"),
            *("<patch_start>", "<patch_end>", "<patch_newline>"),
        ),
    ),
    "fastvlm": Case(
        {"model_type": "fastvlm"},
        preprocessor={"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}},
        words=("<image>",),
    ),
    "gemma4_unified": Case(
        {"model_type": "gemma4_unified"},
        "<image_soft_token>",
        processor={"image_processor": {"max_soft_tokens": 70}},
        named=GEMMA,
    ),
    "deepseekocr": Case(
        {"model_type": "deepseekocr"},
        "<image>x",
        processor={
            **{"candidate_resolutions": [[1024, 1024]], "patch_size": 16, "downsample_ratio": 4},
            **{"image_token": "<image>", "pad_token": "</s>"},
        },
        others=1,
        takes_one=True,
        words=("<image>",),
    ),
    "deepseekocr_2": Case(
        {"model_type": "deepseekocr_2"},
        "<image>x",
        processor={
            **{"candidate_resolutions": [[1024, 1024]], "patch_size": 16, "downsample_ratio": 4},
            **{"image_token": "<image>", "pad_token": "</s>"},
        },
        others=1,
        takes_one=True,
        words=("<image>",),
    ),
    "unlimited-ocr": Case(
        {"model_type": "unlimited-ocr"},
        "<image>",
        processor={"pad_token": "</s>"},
        others=1,
        takes_one=True,
        words=("<image>",),
    ),
    "molmo2": Case(
        {"model_type": "molmo2"},
        "<|image|>",
        preprocessor={"max_crops": 5, "size": {"height": 154, "width": 154}},
        words=(
            *("<|image|>", "<im_patch>", "<im_col>", "<im_start>", "<im_end>"),
            "<low_res_im_start>",
        ),
    ),
    "phi4mm": Case({"model_type": "phi4mm", "max_num_patches": 300}, "<|image_{}|>"),
    "diffusion_gemma": Case({"model_type": "diffusion_gemma"}, "<image_soft_token>", named=GEMMA),
    "aya_vision": Case(
        {"model_type": "aya_vision"},
        preprocessor={
            **{"image_processor_type": "GotOcr2ImageProcessor", "max_patches": 5},
            "size": {"height": 56, "width": 56},
        },
        processor={"patch_size": 14, "downsample_factor": 2, "img_size": 56},
        words=(
            *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL"),
            *(f"TILE_{number}" for number in range(1, 6)),
        ),
    ),
    "ernie4_5_moe_vl": Case(
        {"model_type": "ernie4_5_moe_vl"},
        "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        words=("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>"),
    ),
    "granite_vision": Case(
        {"model_type": "granite_vision"},
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [168, 112], [168, 56]],
        },
        processor={"patch_size": 14, "vision_feature_select_strategy": "full"},
        words=("<image>",),
    ),
    "granite4_vision": Case(
        {"model_type": "granite4_vision", "downsample_rate": "1/2"},
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"height": 84, "width": 84},
            "crop_size": {"height": 84, "width": 84},
            "image_grid_pinpoints": [[84, 168], [168, 84], [252, 168], [252, 84]],
        },
        processor={"patch_size": 14},
        words=("<image>",),
    ),
    "hunyuan_vl": Case(
        {"model_type": "hunyuan_vl"},
        "<start><image><end>",
        words=("<image>", "<place>", "<start>", "<end>"),
    ),
    "qwen3_omni_moe": Case(
        {"model_type": "qwen3_omni_moe"},
        QWEN_IMAGE,
        QWEN_VIDEO,
        {**GRID, "feature_extractor_type": "WhisperFeatureExtractor"},
        named={
            **QWEN,
            **{"audio_token": "<|audio_pad|>", "vision_bos_token": "<|vision_start|>"},
            **{"vision_eos_token": "<|vision_end|>", "audio_bos_token": "<|audio_start|>"},
            "audio_eos_token": "<|audio_end|>",
        },
    ),
    "idefics2": Case(
        {"model_type": "idefics2"},
        preprocessor={
            **{"image_processor_type": "Idefics2ImageProcessor", "do_image_splitting": True},
            "size": {"shortest_edge": 56, "longest_edge": 140},
        },
        processor={"image_seq_len": 7},
        words=("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
    ),
    "kimi_k25": Case(
        {"model_type": "kimi_k25"},
        "<|media_pad|>",
        preprocessor={"media_proc_cfg": {"in_patch_limit": 100, "patch_limit_on_one_side": 30}},
        words=("<|media_pad|>",),
    ),
    "mage_vl": Case(
        {"model_type": "mage_vl"},
        QWEN_IMAGE,
        preprocessor={"max_pixels": 200_000, "patch_size": 16, "temporal_patch_size": 1},
        named=QWEN,
        words=QWEN_WORDS,
    ),
    "mimo_v2": Case(
        {"model_type": "mimo_v2"},
        QWEN_IMAGE,
        preprocessor={"min_pixels": 3136, "max_pixels": 200_000, "patch_size": 14},
        named=QWEN,
        words=QWEN_WORDS,
    ),
    "paddleocr_vl": Case(
        {"model_type": "paddleocr_vl"},
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        preprocessor={"min_pixels": 3136, "max_pixels": 200_000},
        takes_one=True,
        words=("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>"),
    ),
    "zaya1_vl": Case(
        {"model_type": "zaya1_vl"},
        "<|vision_start|><image><|vision_end|>",
        preprocessor={"size": {"shortest_edge": 3136, "longest_edge": 200_000}},
        words=("<image>", *QWEN_WORDS),
    ),
    "gemma4": Case(
        {"model_type": "gemma4"},
        "<image_soft_token>",
        processor={"image_processor": {"max_soft_tokens": 70}},
        named=GEMMA,
    ),
}


QUICK = ("qwen3_vl", "gemma3", "gemma4", "mistral3", "llava_next", "lfm2_vl")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.exhaustive,))
        for name in CASES
    ],
)
def test_images_are_as_the_models_own_processor_makes_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    processor = loaded(save(case, tmp_path))
    for width, height in SIZES:
        check(processor, case, tmp_path, Images((ImageSize(width, height),)))
    many = Images((ImageSize(320, 240), ImageSize(150, 100, 2)))
    if case.takes_one:
        with pytest.raises(UnsupportedError, match="takes one image"):
            planned(tmp_path, many)
    else:
        check(processor, case, tmp_path, many)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.video_prompt])
def test_videos_are_as_the_models_own_processor_makes_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    processor = loaded(save(case, tmp_path))
    for video in (VideoSize(5, 320, 200), VideoSize(1, 64, 64), VideoSize(12, 200, 120)):
        check(processor, case, tmp_path, Images(videos=(video,)))


def test_nanollava_puts_the_features_of_one_image_in_place_of_a_token(tmp_path: Path) -> None:
    from mlx_vlm.models.llava_bunny.llava_bunny import ImageProcessor

    case = Case({"model_type": "llava-qwen2"})
    plan = planned(save(case, tmp_path), Images((ImageSize(320, 200),)))
    (pixels,) = ImageProcessor().preprocess([Image.new("RGB", (320, 200))])
    assert [array.shape for array in plan.arrays] == [(1, *pixels.shape)]
    # llava_bunny.py asserts that there are 729.
    assert (plan.token_count, plan.added) == (1, 728)


def check(processor: Any, case: Case, directory: Path, asked: Images) -> None:
    """Compare one call of the processor, or its refusal, with the plan."""
    images = [Image.new("RGB", (size.width, size.height)) for size in asked.each_image()]
    videos = [np.zeros((v.frames, 3, v.height, v.width), np.uint8) for v in asked.videos]
    given = {"images": images} if images else {"videos": videos}
    prompts = (case.prompt.format(number) for number in range(1, len(images) + 1))
    text = (case.prompt if case.one_mark else "".join(prompts)) + case.video_prompt * len(videos)
    try:
        made = processor(text=text, return_tensors="mlx", **given)
    except (ValueError, ZeroDivisionError):
        made = None
    if made is None or any(0 in getattr(made[name], "shape", ()) for name in made):
        with pytest.raises(InputError):
            planned(directory, asked)
        return
    plan = planned(directory, asked)
    assert plan.token_count == np.asarray(made["input_ids"]).shape[1] - case.others
    # As mlx_vlm/utils.py, prepare_inputs, names them; numbers come in lists.
    expected = {
        "pixel_values" if name == "images" else name: _array(made[name])
        for name in made
        if name not in OF_TEXT
    }
    assert expected.keys() == {array.name for array in plan.arrays}
    for name, value in expected.items():
        arrays = [array for array in plan.arrays if array.name == name]
        values = value if isinstance(value, list) else [value]
        assert [array.shape for array in arrays] == [tuple(each.shape) for each in values]
        types = {str(v.dtype).rpartition(".")[2] for v in values}
        # MLX makes float32 of NumPy's float64.
        own = {"float64": "float32", "bool": "bool_"}
        assert {a.dtype for a in arrays} == {own.get(name, name) for name in types}
        for array, each in zip(arrays, values, strict=True):
            assert not array.values or np.array(each).tolist() == np.array(array.values).tolist()


def _array(value: Any) -> Any:
    is_numbers = isinstance(value, list) and isinstance(value[0], (int, tuple))
    return np.asarray(value) if is_numbers else value
