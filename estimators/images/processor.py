"""The plan of a checkpoint's images, by the family of its processor."""

from typing import Final

from msgspec.structs import replace

from memfit.estimators.base.errors import ConfigError, InputError, UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.base.images import Images
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.families import crops, idefics, kimi, molmo, squares, tiles
from memfit.estimators.images.families.gemma4 import Gemma4
from memfit.estimators.images.families.patch_grids import PatchGrid
from memfit.estimators.images.families.pixtral import Pixtral
from memfit.estimators.images.plan import ImagePlan
from memfit.estimators.images.settings import Processor, processor_files

# Sizes are those of the published models: Qwen/Qwen2-VL-7B-Instruct, Qwen/Qwen2.5-VL-7B-Instruct,
# Qwen/Qwen3-VL-4B-Instruct, Qwen/Qwen3.5-35B-A3B, zai-org/GLM-4.1V-9B-Thinking,
# google/gemma-3-4b-it, google/gemma-3n-E4B-it, google/gemma-4-26B-A4B-it,
# mistral-community/pixtral-12b, mistralai/Mistral-Small-3.1-24B-Instruct-2503.
_QWEN2 = PatchGrid(14, (56 * 56, 14 * 14 * 4 * 16384), takes_videos=True)
_QWEN3 = PatchGrid(16, (256 * 256, 4096 * 4096), stamps_frames=True, takes_videos=True)
_GLM = PatchGrid(14, (112 * 112, 28 * 28 * 12288), counts_frames=True)
_GLM_OCR = PatchGrid(14, (112 * 112, 14 * 14 * 8 * 6144), counts_frames=True)
_ERNIE = PatchGrid(14, (56 * 56, 28 * 28 * 1280), temporal=1, is_fixed=True, cuts_aspect=True)
_HUNYUAN = PatchGrid(16, (512 * 512, 2048 * 2048), temporal=1, is_fixed=True, breaks_rows=True)
_PADDLE = PatchGrid(14, (147384, 2822400), temporal=1, enlarges=True, one_image=True)
_FAST = squares.Expanded(1024, 64, sizes=True)
_BUNNY = squares.Expanded(384, 14, one_image=True)
_GRANITE = tiles.LlavaNext(384, 14, added=0, strategy="full")
FAMILIES: Final[dict[str, Processor]] = {
    "aya_vision": crops.AyaVision(),
    "bunny-llama": _BUNNY,
    "ernie4_5_moe_vl": _ERNIE,
    "gemma4_unified": Gemma4(is_unified=True),
    "granite_vision": _GRANITE,
    "granite4_vision": replace(_GRANITE, patch=16, down="4/8"),
    "hunyuan_vl": _HUNYUAN,
    "idefics2": idefics.Idefics2(),
    "kimi_k25": kimi.KimiK25(),
    "lfm2-vl": tiles.Lfm2(),
    "mage_vl": PatchGrid(16, (56 * 56, 14 * 14 * 4 * 1280), temporal=1),
    "mimo_v2": _QWEN2,
    "paddleocr_vl": _PADDLE,
    "qwen3_omni_moe": PatchGrid(16, (56 * 56, 14 * 14 * 4 * 1280), takes_videos=True),
    "qwen4_exp": _QWEN3,
    "unlimited-ocr": crops.DeepseekOcr(most=32, one_image=True),
    "zaya1_vl": PatchGrid(14, (56 * 56, 14 * 14 * 4 * 1280)),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "fastvlm": _FAST,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm_ocr": _GLM_OCR,
    "deepseek_vl_v2": crops.DeepseekVL2(),
    "deepseekocr": crops.DeepseekOcr(one_image=True),
    "deepseekocr_2": crops.DeepseekOcr(768, 6, lines=False, one_image=True),
    "diffusion_gemma": Gemma4(takes_videos=True),
    "dots_ocr": PatchGrid(14, (56 * 56, 3360 * 3360), temporal=1),
    "gemma3": squares.Square(896, 14, 256, "image_seq_length", before=2, after=2, crops=True),
    "gemma3n": squares.Square(768, 16, 256, "image_seq_length", before=2, after=2),
    "gemma4": Gemma4(takes_videos=True),
    "idefics3": idefics.Idefics3(1456, 364, 169),
    "internvl": crops.InternVL("image_seq_length", 256),
    "internvl_chat": crops.InternVL(),
    "kimi_vl": kimi.KimiVL(),
    "lfm2_vl": tiles.Lfm2(),
    "llama4": crops.Llama4(),
    "llava-qwen2": _BUNNY,
    "llava_qwen2": _FAST,
    "llava": squares.Clip(336, 14),
    "llava_next": tiles.LlavaNext(),
    "llava_onevision": crops.LlavaOnevision(),
    "mllama": tiles.Mllama(),
    "molmo": molmo.Molmo(one_image=True),
    "molmo2": molmo.Molmo2(),
    "paligemma": squares.Square(224, 14, 256, "image_seq_length"),
    "phi3_v": tiles.Phi3V(),
    "phi4mm": tiles.Phi4MM(),
    "step3p7": crops.Step3(),
    "smolvlm": idefics.Idefics3(2048, 512, 64, patch=16),
    "pixtral": Pixtral(1024, 16, 1),
    "mistral3": Pixtral(1540, 14, 2),
}


# The sections of a config that describe a vision tower.
_TOWERS = ("vision_config", "vision_tower", "mm_vision_tower", "img_processor", "visual")


def has_tower(checkpoint: Checkpoint) -> bool:
    """Whether a config describes a vision tower."""
    return any(checkpoint.config.get(key) for key in _TOWERS)


def takes_images(checkpoint: Checkpoint) -> bool:
    """Whether a model is of a family with images, or its config describes a vision tower."""
    return checkpoint.config.get("model_type") in FAMILIES or has_tower(checkpoint)


def with_image_tokens(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """Return a workload with the tokens of its images added to those of its text.

    Raises:
        MemfitError: as `image_plan`.
    """
    if not workload.images:
        return workload
    plan = image_plan(checkpoint, workload.images)
    tokens = plan.token_count + plan.added
    return replace(
        workload,
        prompt_tokens=workload.prompt_tokens + tokens,
        images=replace(workload.images, tokens=tokens),
    )


def image_plan(checkpoint: Checkpoint, images: Images) -> ImagePlan:
    """Return what the checkpoint's processor makes of images.

    Raises:
        CheckpointError: as `processor_files`.
        ConfigError: as `processor_files`, or for a setting that is wrong.
        InputError: for an image that the processor refuses.
        UnsupportedError: when the processor is not described, or the model takes no images.
    """
    kind = checkpoint.config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if not takes_images(checkpoint):
        raise InputError(
            f"{printable(checkpoint.id)}: a model of type {printable(kind)} without a vision tower"
            " takes no images"
        )
    if family is None:
        raise UnsupportedError(
            f"{printable(checkpoint.id)}: how a model of type {printable(kind)} takes images is"
            f" not described; described are {', '.join(sorted(FAMILIES))}"
        )
    files = processor_files(checkpoint)
    family.require(files, images)
    try:
        plan = family.plan(files, images)
    except ArithmeticError:  # a tile without a patch, or without a resolution to choose
        raise ConfigError(
            f"{files.image.reading.name}: its sizes leave nothing of an image of {images}"
        ) from None
    for image in plan.images:
        if min(image.width, image.height, image.patches, image.feature_count) < 1:
            raise InputError(f"{images}: the model's processor resizes an image to nothing")
    return replace(plan, is_assumed=not files.are_there)
