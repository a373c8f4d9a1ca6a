"""Processors that crop an image to tiles of one size: InternVL, LLaVA-OneVision, Aya Vision,
DeepSeek-VL2 and -OCR, Llama 4 and Step-3.7; molmo.py has more.

Sources: mlx_vlm/models/internvl_chat/processor.py (also of internvl), processing*.py of
llava_onevision, aya_vision, deepseek_vl_v2, deepseekocr, deepseekocr_2, unlimited_ocr, llama4
and step3p7; transformers' models/llava_onevision/image_processing_pil_llava_onevision.py.
"""

import math
from collections.abc import Iterable

from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.units import ceil_div
from memfit.estimators.images.families.fitting import (
    best_resolution,
    closest_grid,
    grid_by_half,
    unpadded,
)
from memfit.estimators.images.families.tiles import padded_tiles
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import ONE_TOKEN, Processor, ProcessorFiles

_MOST_FEATURES = 2**20


class InternVL(Processor, frozen=True):
    """Up to 12 tiles in the ratio of the image, and the whole image as one more."""

    features_key: str = "num_image_token"
    """The key of processor_config.json with the features of a tile."""
    features: int | None = None
    """Without it; None: as many as the sizes of config.json leave."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; most settings are in config.json."""
        vision = files.config.sub("vision_config")
        side = vision.pair("image_size", 448)[0]
        patch = vision.pair("patch_size", 14)[0]
        least = files.config.count("min_dynamic_patch", 1, most=64)
        most = files.config.count("max_dynamic_patch", 12, most=64)
        adds_whole = files.config.flag("use_thumbnail", default=True)
        if self.features is None:
            side = files.config.count("force_image_size", side, most=4096)
            side = files.processor.count("image_size", side, most=4096)
            patch = files.processor.count("patch_size", patch, most=256)
        ratio = files.config.ratio("downsample_ratio", 0.5)
        ratio = files.processor.ratio("downsample_ratio", ratio)
        features = self.features or int((side // patch) ** 2 * ratio**2)
        features = files.processor.count(
            self.features_key, max(1, features), least=1, most=_MOST_FEATURES
        )
        images = []
        for image in inputs.each_image():
            tiles = math.prod(_grid_by_area(image, least, most, side))
            tiles += adds_whole and tiles > 1
            tokens = (ONE_TOKEN, TokenRun("image", features * tiles), ONE_TOKEN)
            patches = tiles * ((side // patch) ** 2 + 1)
            images.append(PlannedImage(side, side, patches, tokens, tiles))
        return _one_array(images, (CHANNELS, side, side), leading=(1,))


def _grid_by_area(image: ImageSize, least: int, most: int, side: int) -> tuple[int, int]:
    def is_nearer(count: int, best: int) -> bool:
        return abs(image.pixels - side**2 * count) < abs(image.pixels - side**2 * best)

    return closest_grid(image, least, most, is_nearer)


class AyaVision(Processor, frozen=True):
    """Up to 12 tiles in the ratio of the image, each after its number, and the whole image."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        side = files.image.edge("size", 364)
        least = files.image.count("min_patches", 1, most=64)
        most = files.image.count("max_patches", 12, most=64)
        patch = files.processor.count("patch_size", 28, most=4096)
        patch *= files.processor.count("downsample_factor", 1, most=64)
        features = (files.processor.count("img_size", 364, most=4096) // patch) ** 2
        images = []
        for image in inputs.each_image():
            tiles = math.prod(grid_by_half(image, least, most, side))
            tiles += tiles > 1
            tokens = (ONE_TOKEN, *(ONE_TOKEN, TokenRun("image", features)) * tiles, ONE_TOKEN)
            images.append(PlannedImage(side, side, tiles * (side // 14) ** 2, tokens, tiles))
        return _one_array(images, (CHANNELS, side, side))


class LlavaOnevision(Processor, frozen=True):
    """LLaVA-NeXT's tiles of the best resolution, their features reduced to a limit."""

    side: int = 384
    features: int = 729
    limit: int = 9
    tiles: int = 6
    """Along an edge, of the published resolutions."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; each image has as many tiles as the largest one."""
        side = files.image.edge("size", self.side)
        each = files.processor.count("num_image_tokens", self.features, most=_MOST_FEATURES)
        strategy = files.processor.text("vision_feature_select_strategy", "full")
        aspect = files.config.text("vision_aspect_ratio", f"anyres_max_{self.limit}")
        limit = aspect.removeprefix("anyres_max_")
        if not limit.isdecimal() or not 0 < int(limit) <= _MOST_FEATURES:
            raise files.config.fail("vision_aspect_ratio", f"expected anyres_max_9, got {aspect}")
        edges = range(self.side, self.side * (self.tiles + 1), self.side)
        points = files.image.sizes("image_grid_pinpoints", [[h, w] for h in edges for w in edges])
        images = []
        for image in inputs.each_image():
            height, width = best_resolution(image, points)
            across = math.isqrt(each)
            rows, columns = unpadded(image, height // side, width // side, across)
            ratio = math.sqrt(rows * columns / (int(limit) * across**2))
            if ratio > 1.1:
                rows, columns = int(rows // ratio), int(columns // ratio)
            features = rows * columns + rows + each - (strategy == "default")
            tiles = 1 + (height // side) * (width // side)
            run = (TokenRun("image", features),)
            images.append(PlannedImage(side, side, tiles * each, run, tiles))
        planned = padded_tiles(images, inputs, side)
        count = InputArray("batch_num_images", (len(images),), "int64", (1,) * len(images))
        return ImagePlan(planned.images, (*planned.arrays, count))


# Widths and heights of the published models, in tiles.
_DEEPSEEK = (
    *((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 5), (5, 1), (1, 6)),
    *((6, 1), (2, 3), (3, 2), (1, 7), (7, 1), (1, 8), (8, 1), (2, 4), (4, 2), (1, 9), (9, 1)),
    (3, 3),
)


class DeepseekVL2(Processor, frozen=True):
    """The whole image, and tiles of the best resolution of a list; one to three images."""

    side: int = 384
    patch: int = 14
    down: int = 2

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; more than two images have one tile each in addition to the whole."""
        published = [[w * self.side, h * self.side] for w, h in _DEEPSEEK]
        points = files.processor.sizes("candidate_resolutions", published)
        if not points:
            raise files.processor.fail("candidate_resolutions", "there are none")
        patch = files.processor.count("patch_size", self.patch, most=256)
        down = files.processor.count("downsample_ratio", self.down, most=64)
        side = points[0][0]
        across = ceil_div(side // patch, down)
        images, crops = [], []
        for image in inputs.each_image():
            height, width = side, side
            if len(inputs.each_image()) <= 2:
                height, width = best_resolution(image, [(h, w) for w, h in points])
            columns, rows = width // side, height // side
            features = across * (across + 1) + 1 + rows * across * (columns * across + 1)
            tiles = ceil_div(width, side) * ceil_div(height, side) + 1
            patches = tiles * (side // patch) ** 2
            run = (TokenRun("image", features),)
            images.append(PlannedImage(side, side, patches, run, tiles))
            crops.append((columns, rows))
        planned = _one_array(images, (CHANNELS, side, side), leading=(1,))
        crop = InputArray("images_spatial_crop", (1, len(images), 2), "int32", (tuple(crops),))
        return ImagePlan(planned.images, (*planned.arrays, crop))


class DeepseekOcr(Processor, frozen=True):
    """A view of the whole image, and tiles of an image that is larger than one."""

    tile: int = 640
    most: int = 9
    lines: bool = True
    """Whether rows of features end with a break; then one tile is none."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan of one image; settings are constants."""
        (image,) = inputs.each_image()
        base, across, least = 1024, ceil_div(self.tile // 16, 4), 2 if self.lines else 1
        columns = rows = 1
        if max(image.width, image.height) > self.tile or not self.lines:
            columns, rows = grid_by_half(image, least, self.most, self.tile)
        crops = columns * rows if columns * rows >= least else 0
        features = 257 + crops * across**2
        if self.lines:
            features += 16 + bool(crops) * rows * across
        patches = (base // 16) ** 2 + crops * (self.tile // 16) ** 2
        shape, dtype = (1, CHANNELS, base, base), "float32"
        if crops:
            shape, dtype = (crops, CHANNELS, self.tile, self.tile), "bfloat16"
        grid = (columns, rows)
        return ImagePlan(
            images=(PlannedImage(base, base, patches, (TokenRun("image", features),), 1 + crops),),
            arrays=(
                InputArray("pixel_values", shape, dtype),
                InputArray("pixel_values", (1, CHANNELS, base, base), "bfloat16"),
                InputArray("images_spatial_crop", (1, 2), "int32", (grid,)),
            ),
        )


class Llama4(Processor, frozen=True):
    """Tiles in one of eight ratios with separators; the whole image has tokens of its own."""

    side: int = 336
    patch: int = 14
    shuffled: int = 4
    """Patches that become one token."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        side = files.image.pair("size", self.side)[0]
        most = files.image.count("max_patches", 16, most=256)
        each = (side // self.patch) ** 2 // self.shuffled
        images = []
        for image in inputs.each_image():
            rows, columns = _least_stretched(image, side, most)
            tiles = rows * columns
            tokens: tuple[TokenRun, ...] = (ONE_TOKEN, TokenRun("image", each), ONE_TOKEN)
            if tiles > 1:
                line = (TokenRun("image", each), ONE_TOKEN) * columns
                tokens = (ONE_TOKEN, *line * rows, *tokens)
            else:
                tokens = (ONE_TOKEN, *tokens)
            patches = tiles * ((side // self.patch) ** 2 + 1)
            images.append(PlannedImage(side, side, patches, tokens, tiles))
        return _one_array(images, (CHANNELS, side, side))


def _least_stretched(image: ImageSize, side: int, most: int) -> tuple[int, int]:
    """Rows and columns that the image, scaled to fit, fills best."""
    grids = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]

    def left(grid: tuple[int, int]) -> float:
        height, width = grid[0] * side, grid[1] * side
        scale = min(width / image.width, height / image.height)
        return abs(image.width * scale - width) + abs(image.height * scale - height)

    return min((grid for grid in grids if math.prod(grid) <= most), key=left)


class Step3(Processor, frozen=True):
    """Windows of a square that the image is padded to, and the whole; settings are constants."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        images, counts = [], []
        for image in inputs.each_image():
            across = _windows(max(image.width, image.height))
            tokens: list[TokenRun] = []
            for row in range(across):
                tokens += (ONE_TOKEN, TokenRun("image", 81), ONE_TOKEN) * across
                tokens += [ONE_TOKEN] * (row < across - 1)  # a line break
            tokens += (ONE_TOKEN, TokenRun("image", 169), ONE_TOKEN)
            patches = across**2 * (504 // 14) ** 2 + (728 // 14) ** 2
            images.append(PlannedImage(728, 728, patches, tuple(tokens), across**2 + 1))
            counts.append(across**2)
        whole = InputArray("pixel_values", (len(images), CHANNELS, 728, 728), "float32")
        count = InputArray("num_patches", (len(images),), "int64", tuple(counts))
        crops = InputArray("patch_pixel_values", (sum(counts), CHANNELS, 504, 504), "float32")
        return ImagePlan(tuple(images), (whole, count, *([crops] if sum(counts) else [])))


def _windows(side: int) -> int:
    """Windows of 504 pixels along a square; a fifth of one more makes another."""
    side = min(side, 3024)
    if side <= 728:
        return 0
    whole = side / 504
    return int(whole) + (whole - int(whole) > 0.2)


def _one_array(
    images: Iterable[PlannedImage], shape: tuple[int, ...], leading: tuple[int, ...] = ()
) -> ImagePlan:
    planned = tuple(images)
    tiles = sum(image.tiles for image in planned)
    return ImagePlan(planned, (InputArray("pixel_values", (*leading, tiles, *shape), "float32"),))
