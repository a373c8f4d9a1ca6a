"""Gemma 4: the aspect ratio is kept, the image fills a budget of soft tokens.

Source: mlx_vlm/models/gemma4/processing_gemma4.py.
"""

import math

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.images import Images, VideoSize
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import ONE_TOKEN, FileSettings, Processor, ProcessorFiles

_IMAGE_TOKENS = 280
_FRAME_TOKENS = 70
_FRAMES = 32


class Gemma4(Processor, frozen=True):
    """The processor of all sizes of Gemma 4."""

    is_unified: bool = False
    """Whether the class is given patches, up to the budget, in place of pixels."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        still = [
            _planned(files.image, image.height, image.width, _IMAGE_TOKENS)
            for image in inputs.each_image()
        ]
        moving = [_video(files.video, video) for video in inputs.videos]
        shapes = [(CHANNELS, image.height, image.width) for image in still]
        # Images of one size are one array, others a list of arrays.
        pixels = [(len(still), *shapes[0])] if len(set(shapes)) == 1 else shapes
        of_images = tuple(InputArray("pixel_values", shape, "float32") for shape in pixels)
        if self.is_unified:
            of_images = _patches(files.image, [image.feature_count for image in still])
        return ImagePlan(
            images=(*still, *moving),
            arrays=(
                *of_images,
                *(array for image in moving for array in _video_arrays(files.video, image)),
            ),
            tokens_are_bound=bool(moving),
        )


def _planned(settings: FileSettings, height: int, width: int, budget: int) -> PlannedImage:
    """An image within its budget; the arithmetic in floats is the processor's own."""
    patch = settings.edge("patch_size", 16)
    pooled = settings.count("pooling_kernel_size", 3, most=64)
    tokens = settings.count("max_soft_tokens", budget, most=2**20)
    unit, patches = pooled * patch, tokens * pooled**2
    factor = math.sqrt(patches * patch**2 / (height * width))
    rows = math.floor(factor * height / unit)
    columns = math.floor(factor * width / unit)
    if not rows and not columns:
        raise InputError(f"image {width}x{height}: the model's processor resizes it to nothing")
    if not rows:
        rows, columns = 1, min(math.floor(width / height), tokens)
    elif not columns:
        rows, columns = min(math.floor(height / width), tokens), 1
    found = rows * columns
    return PlannedImage(
        width=columns * unit,
        height=rows * unit,
        patches=found * pooled**2,
        tokens=(ONE_TOKEN, TokenRun("image", found), ONE_TOKEN),
    )


def _patches(settings: FileSettings, features: list[int]) -> tuple[InputArray, ...]:
    """Source: mlx_vlm/models/gemma4_unified/processing_gemma4_unified.py."""
    side = settings.edge("patch_size", 16) * settings.count("pooling_kernel_size", 3, most=64)
    shape = (len(features), settings.count("max_soft_tokens", _IMAGE_TOKENS, most=2**20))
    return (
        InputArray("pixel_values", (*shape, CHANNELS * side**2), "float32"),
        InputArray("image_position_ids", (*shape, 2), "int64"),
    )


def _video(settings: FileSettings, video: VideoSize) -> PlannedImage:
    """A video of at most 32 frames, each with its time before it, a token a character."""
    frames = min(video.frames, settings.count("num_frames", _FRAMES, most=4096))
    one = _planned(settings, video.height, video.width, _FRAME_TOKENS)
    features = one.feature_count
    line = (TokenRun("text", len("00:00 ") + 2), TokenRun("video", features), ONE_TOKEN)
    return PlannedImage(
        width=one.width,
        height=one.height,
        patches=frames * one.patches,
        tokens=line * frames,
        tiles=frames,
    )


def _video_arrays(settings: FileSettings, video: PlannedImage) -> tuple[InputArray, ...]:
    """Frames are padded to the budget."""
    patch = settings.edge("patch_size", 16)
    pooled = settings.count("pooling_kernel_size", 3, most=64)
    patches = settings.count("max_soft_tokens", _FRAME_TOKENS, most=2**20) * pooled**2
    place = (1, video.tiles, patches)
    return (
        InputArray("pixel_values_videos", (*place, CHANNELS * patch**2), "float32"),
        InputArray("video_position_ids", (*place, 2), "int64"),
    )
