"""Processors that keep the aspect ratio and give the tower a grid of patches: Qwen-VL, GLM-V,
GLM-OCR, dots.ocr, PaddleOCR-VL, ERNIE 4.5 VL and Hunyuan-VL.

Sources: mlx_vlm/models/qwen3_vl/processing_qwen3_vl.py (of Qwen2-VL, 2.5-VL, 3-VL and 3.5; also of
Qwen3-Omni, MiMo-V2 and Zaya1-VL), mlx_vlm/models/glm4v/processing.py, glm_ocr/processing.py and
processing_*.py of dots_ocr, paddleocr_vl, ernie4_5_moe_vl and hunyuan_vl; transformers'
models/glm4v/image_processing_pil_glm4v.py.
"""

import math
from typing import Literal, NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.images import Images, ImageSize, VideoSize
from memfit.estimators.base.units import ceil_div
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import FileSettings, Processor, ProcessorFiles

MOST_ASPECT = 200
_VIDEO_PIXELS = (128 * 32 * 32, 768 * 32 * 32)  # defaults of Qwen3VLVideoProcessor
_FRAMES_A_SECOND = 2.0


class PatchGrid(Processor, frozen=True):
    """How one family resizes; ``pixels`` are the fewest and the most of its published models."""

    patch: int
    pixels: tuple[int, int]
    counts_frames: bool = False
    """Whether the pixels of an image count once for each frame of a patch, as in GLM-V."""
    temporal: int = 2
    """Frames of a patch."""
    stamps_frames: bool = False
    """Whether each group of frames has its time and its own borders in the prompt."""
    is_fixed: bool = False
    """Whether the processor reads no file."""
    enlarges: bool = False
    """Whether a short side becomes that of a patch first, one side after the other."""
    cuts_aspect: bool = False
    """Whether a side above 200 times the other is made shorter."""
    breaks_rows: bool = False
    """Whether features have a break after each row, a start and an end."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        settings = FileSettings({}, files.image.reading) if self.is_fixed else files.image
        of_images = _read(settings, self, self.pixels)
        video = files.video if files.video.values else files.image
        of_videos = _read(video, self, _VIDEO_PIXELS)
        still = [self._image(of_images, image) for image in inputs.each_image()]
        moving = [self._video(of_videos, each) for each in inputs.videos]
        return ImagePlan(
            images=tuple(each.image for each in (*still, *moving)),
            arrays=(
                *_arrays("pixel_values", "image_grid_thw", still, of_images, self.one_image),
                *_arrays("pixel_values_videos", "video_grid_thw", moving, of_videos),
            ),
            tokens_are_bound=bool(moving) and self.stamps_frames,
        )

    def _image(self, settings: "_Settings", image: ImageSize) -> "_Gridded":
        frames = settings.temporal if self.counts_frames else 1
        height, width = image.height, image.width
        if self.counts_frames and min(height, width) < settings.unit:
            scale = max(settings.unit / height, settings.unit / width)
            height, width = int(height * scale), int(width * scale)
        if self.enlarges and height < settings.unit:
            height, width = settings.unit, round(width * settings.unit / height)
        if self.enlarges and width < settings.unit:
            height, width = round(height * settings.unit / width), settings.unit
        if self.cuts_aspect:
            height, width = _cut(height, width, settings)
        else:
            height, width = resized(f"image {image}", height, width, settings, frames, frames)
        grid = (1, height // settings.patch, width // settings.patch)
        tokens = _framed(grid, settings, "image")
        if self.breaks_rows:
            rows, columns = grid[1] // settings.merge, grid[2] // settings.merge
            tokens = (tokens[0], TokenRun("image", rows * (columns + 1) + 2), tokens[2])
        return _Gridded(_planned(grid, settings, tokens), grid)

    def _video(self, settings: "_Settings", video: VideoSize) -> "_Gridded":
        if min(video.height, video.width) < settings.unit:
            raise InputError(
                f"video {video}: the model's processor takes frames of at least {settings.unit}"
                " pixels a side"
            )
        groups = -(-video.frames // settings.temporal)
        frames = video.frames, groups * settings.temporal
        height, width = resized(f"video {video}", video.height, video.width, settings, *frames)
        grid = (groups, height // settings.patch, width // settings.patch)
        runs = _stamped if self.stamps_frames else _framed
        return _Gridded(_planned(grid, settings, runs(grid, settings, "video")), grid)


class _Settings(NamedTuple):
    patch: int
    merge: int
    temporal: int
    least: int
    most: int

    @property
    def unit(self) -> int:
        """Sides are multiples of it."""
        return self.patch * self.merge


class _Gridded(NamedTuple):
    image: PlannedImage
    grid: tuple[int, int, int]
    """Groups of frames, rows and columns of patches."""


def resized(
    name: str, height: int, width: int, settings: _Settings, frames: int, depth: int
) -> tuple[int, int]:
    """Return height and width after resizing; the arithmetic in floats is the processors' own.

    ``depth`` is the frames with those that fill the last group.

    Raises:
        InputError: when one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > MOST_ASPECT:
        raise InputError(
            f"{name}: the model's processor takes no side above {MOST_ASPECT} times the other"
        )
    unit = settings.unit
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if depth * rows * columns > settings.most:
        beta = math.sqrt((frames * height * width) / settings.most)
        rows = max(unit, math.floor(height / beta / unit) * unit)
        columns = max(unit, math.floor(width / beta / unit) * unit)
    elif depth * rows * columns < settings.least:
        beta = math.sqrt(settings.least / (frames * height * width))
        rows = math.ceil(height * beta / unit) * unit
        columns = math.ceil(width * beta / unit) * unit
    return rows, columns


def _cut(height: int, width: int, settings: _Settings) -> tuple[int, int]:
    """Return height and width as ERNIE 4.5 VL's processor has them."""
    height, width = min(height, width * MOST_ASPECT), min(width, height * MOST_ASPECT)
    unit = settings.unit
    rows = max(unit, round(height / unit) * unit)
    columns = max(unit, round(width / unit) * unit)
    beta = math.sqrt(height * width / settings.most)
    if rows * columns > settings.most:
        rows, columns = int(height / beta) // unit * unit, int(width / beta) // unit * unit
    elif rows * columns < settings.least:
        beta = math.sqrt(settings.least / (height * width))
        rows = ceil_div(int(height * beta), unit) * unit
        columns = ceil_div(int(width * beta), unit) * unit
    return max(unit, rows), max(unit, columns)


def _read(settings: FileSettings, family: PatchGrid, pixels: tuple[int, int]) -> _Settings:
    least, most = settings.pixels(pixels)
    return _Settings(
        patch=settings.edge("patch_size", family.patch),
        merge=settings.count("merge_size", 2, most=64),
        temporal=settings.count("temporal_patch_size", family.temporal, most=64),
        least=least,
        most=most,
    )


def _planned(
    grid: tuple[int, int, int], settings: _Settings, tokens: tuple[TokenRun, ...]
) -> PlannedImage:
    groups, rows, columns = grid
    return PlannedImage(
        width=columns * settings.patch,
        height=rows * settings.patch,
        patches=groups * rows * columns,
        tokens=tokens,
    )


def _framed(
    grid: tuple[int, int, int], settings: _Settings, kind: Literal["image", "video"]
) -> tuple[TokenRun, ...]:
    """The features between the tokens that the chat template has around an image."""
    border = TokenRun("text", 1)
    return border, TokenRun(kind, math.prod(grid) // settings.merge**2), border


def _stamped(
    grid: tuple[int, int, int], settings: _Settings, kind: Literal["image", "video"]
) -> tuple[TokenRun, ...]:
    """Each group of frames with its time before it, such as "<0.2 seconds>", a token a letter."""
    groups, rows, columns = grid
    runs: list[TokenRun] = []
    for group in range(groups):
        first = group * settings.temporal / _FRAMES_A_SECOND
        seconds = first + (settings.temporal - 1) / 2 / _FRAMES_A_SECOND
        runs += _framed((1, rows, columns), settings, kind)
        runs[-3] = TokenRun("text", len(f"<{seconds:.1f} seconds>") + 1)
    return tuple(runs)


def _arrays(
    pixels: str, grid: str, found: list[_Gridded], settings: _Settings, in_batch: bool = False
) -> tuple[InputArray, ...]:
    if not found:
        return ()
    patches = sum(each.image.patches for each in found)
    shape: tuple[int, ...] = (patches, CHANNELS * settings.temporal * settings.patch**2)
    if in_batch:
        shape = (1, patches, CHANNELS, settings.patch, settings.patch)
    return (
        InputArray(pixels, shape, "float32"),
        InputArray(grid, (len(found), 3), "int64", tuple(each.grid for each in found)),
    )
