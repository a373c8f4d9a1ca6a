"""Processors that make every image a square of one size: Gemma 3 and 3n, PaliGemma, LLaVA 1.5,
FastVLM and nanoLLaVA.

Sources: mlx_vlm/models/gemma3/processing_gemma3.py, gemma3n/processing_gemma3n.py,
paligemma/processing_paligemma.py, llava/processing_llava.py, fastvlm/processing.py and
llava_bunny/llava_bunny.py; transformers' models/gemma3/image_processing_pil_gemma3.py.
"""

import math

from msgspec.structs import replace

from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import FileSettings, Processor, ProcessorFiles


class Square(Processor, frozen=True):
    """One family; its sizes are those of its published models."""

    side: int
    patch: int
    features: int
    """Tokens of an image."""
    features_key: str = ""
    """The key of processor_config.json that has them."""
    before: int = 0
    """Tokens of text before the features, and after them."""
    after: int = 0
    crops: bool = False
    """Whether the processor can add crops of long images: pan and scan."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        features = files.processor.count(self.features_key, self.features, most=2**20)
        features = files.image.count(self.features_key, features, most=2**20)
        one = (
            TokenRun("text", self.before),
            TokenRun("image", features),
            TokenRun("text", self.after),
        )
        crops = [_crops(files.image, each) if self.crops else 0 for each in inputs.each_image()]
        return _squares(files.image.pair("size", self.side), self.patch, one, crops)


class Clip(Processor, frozen=True):
    """LLaVA 1.5: CLIP's square, its class token left out where the strategy says so."""

    side: int
    patch: int

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        key = "crop_size" if "crop_size" in files.image else "size"
        size = files.image.pair(key, self.side)
        patch = files.processor.count("patch_size", self.patch, most=256)
        added = files.processor.count("num_additional_image_tokens", 1, least=0, most=64)
        strategy = files.processor.text("vision_feature_select_strategy", "default")
        features = (size[0] // patch) * (size[1] // patch) + added - (strategy == "default")
        return _squares(size, patch, (TokenRun("image", features),), [0] * len(inputs.each_image()))


class Expanded(Processor, frozen=True):
    """FastVLM and nanoLLaVA: one token, in place of which the class puts all features."""

    side: int
    patch: int
    """Pixels that become one feature, along an edge."""
    sizes: bool = False
    """Whether the class is given the sizes of the images."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        count = len(inputs.each_image())
        side = files.image.pair("crop_size" if "crop_size" in files.image else "size", self.side)
        features = (side[0] // self.patch) * (side[1] // self.patch)
        planned = _squares(side, self.patch, (TokenRun("image", 1),), [0] * count)
        images = tuple(replace(image, added=features - 1) for image in planned.images)
        sizes = tuple((image.width, image.height) for image in inputs.each_image())
        shown = InputArray("image_sizes", (count, 2), "int64", sizes)
        return ImagePlan(images, (*planned.arrays, *([shown] if self.sizes else [])))


def _squares(
    size: tuple[int, int], patch: int, one: tuple[TokenRun, ...], crops: list[int]
) -> ImagePlan:
    height, width = size
    images = tuple(
        PlannedImage(
            width=width,
            height=height,
            patches=(1 + count) * (height // patch) * (width // patch),
            tokens=one * (1 + count) + _crop_text(count),
            tiles=1 + count,
        )
        for count in crops
    )
    tiles = sum(image.tiles for image in images)
    return ImagePlan(
        images=images,
        arrays=(InputArray("pixel_values", (tiles, CHANNELS, height, width), "float32"),),
        tokens_are_bound=any(crops),
    )


def _crops(settings: FileSettings, image: ImageSize) -> int:
    """Crops of an image that is long enough; source: Gemma3ImageProcessorPil.pan_and_scan."""
    if not settings.flag("do_pan_and_scan", default=False):
        return 0
    least = settings.count("pan_and_scan_min_crop_size", 256)
    most = settings.count("pan_and_scan_max_num_crops", 4, most=256)
    ratio = settings.ratio("pan_and_scan_min_ratio_to_activate", 1.2)
    long, short = max(image.width, image.height), min(image.width, image.height)
    if long / short < ratio:
        return 0
    crops = min(math.floor(long / least), math.floor(long / short + 0.5))
    crops = min(most, max(2, crops))
    return 0 if min(math.ceil(long / crops), short) < least else crops


def _crop_text(crops: int) -> tuple[TokenRun, ...]:
    """The sentence around crops, a token a character."""
    if not crops:
        return ()
    text = "Here is the original image  and here are some crops to help you see better "
    return (TokenRun("text", len(text) + crops - 1),)
