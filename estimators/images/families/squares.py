"""Processors that make every image a square of one size: Gemma 3 and 3n, PaliGemma, LLaVA 1.5.

Sources: mlx_vlm/models/gemma3/processing_gemma3.py, gemma3n/processing_gemma3n.py,
paligemma/processing_paligemma.py and llava/processing_llava.py; transformers'
models/gemma3/image_processing_pil_gemma3.py.
"""

import math

from msgspec import Struct

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.images.plan import ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import ProcessorFiles, Settings

CHANNELS = 3


class Square(Struct, frozen=True):
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

    def plan(self, files: ProcessorFiles, asked: Images) -> ImagePlan:
        """Return the plan of all images.

        Raises:
            UnsupportedError: for a video, which mlx-vlm's processors of these models do not take.
        """
        if asked.videos:
            raise UnsupportedError(
                f"{files.config.reading.name}: mlx-vlm's processor of this model takes no videos"
            )
        height, width = files.image.pair("size", self.side)
        features = files.processor.count(self.features_key, self.features, most=2**20)
        images = []
        for image in asked.each_image():
            crops = _crops(files.image, image) if self.crops else 0
            one = (
                TokenRun("text", self.before),
                TokenRun("image", features),
                TokenRun("text", self.after),
            )
            images.append(
                PlannedImage(
                    width=width,
                    height=height,
                    patches=(1 + crops) * (height // self.patch) * (width // self.patch),
                    tokens=one * (1 + crops) + _crop_text(crops),
                    tiles=1 + crops,
                )
            )
        tiles = sum(image.tiles for image in images)
        return ImagePlan(
            images=tuple(images),
            arrays=(InputArray("pixel_values", (tiles, CHANNELS, height, width), "float32"),),
            tokens_are_bound=tiles > len(images),
        )


def _crops(settings: Settings, image: ImageSize) -> int:
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
