"""Processors that divide an image into tiles of one size: LLaVA-NeXT, Phi-3-vision, Phi-4,
Llama 3.2 Vision and LFM2-VL; crops.py has more.

Sources: mlx_vlm/models/*/processing_*.py of llava_next, phi3_v, phi4mm, mllama, lfm2_vl,
granite_vision and granite4_vision; transformers' image_processing_pil_*.py of llava_next and
mllama.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from memfit.estimators.base.files import short
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.images.families.fitting import best_resolution, grid_by_half, unpadded
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import ONE_TOKEN, Processor, ProcessorFiles


class LlavaNext(Processor, frozen=True):
    """The whole image, and tiles of the best resolution of a list, without its padding."""

    side: int = 336
    patch: int = 14
    added: int = 1
    """Features of a tile in addition to those of its patches."""
    strategy: str = "default"
    """By default the first of them is left out."""
    down: str = "1"
    """The share of rows and columns of patches that become features."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; each image has as many tiles as the largest one."""
        side = files.image.edge("crop_size" if "crop_size" in files.image else "size", self.side)
        patch = files.processor.count("patch_size", self.patch, most=256)
        added = files.processor.count("num_additional_image_tokens", self.added, least=0, most=64)
        strategy = files.processor.text("vision_feature_select_strategy", self.strategy)
        shapes = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
        published = [[self.side * h, self.side * w] for h, w in shapes]
        points = files.config.sizes("image_grid_pinpoints", published)
        if "image_grid_pinpoints" in files.image:
            points = files.image.sizes("image_grid_pinpoints", [])
        across = int(side // patch * self._share(files))
        images = []
        for image in inputs.each_image():
            height, width = best_resolution(image, points)
            tiles = 1 + (height // side) * (width // side)
            rows, columns = unpadded(image, height // side, width // side, across)
            features = rows * columns + rows + across**2 + added - (strategy == "default")
            patches = tiles * (side // patch) ** 2
            run = (TokenRun("image", features),)
            images.append(PlannedImage(side, side, patches, run, tiles))
        return padded_tiles(images, inputs, side)

    def _share(self, files: ProcessorFiles) -> Fraction:
        place = files.processor if "downsample_rate" in files.processor else files.config
        text = place.text("downsample_rate", self.down)
        try:
            share = Fraction(text)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not 0 < share <= 1:
            raise place.fail("downsample_rate", f"expected a share such as 4/8, got {short(text)}")
        return share


def padded_tiles(images: Sequence[PlannedImage], inputs: Images, side: int) -> ImagePlan:
    """Return a plan in which all images have as many tiles as the largest, with their own sizes."""
    most = max(image.tiles for image in images)
    sizes = tuple((image.height, image.width) for image in inputs.each_image())
    return ImagePlan(
        images=tuple(images),
        arrays=(
            InputArray("pixel_values", (len(images), most, CHANNELS, side, side), "float32"),
            InputArray("image_sizes", (len(images), 2), "int64", sizes),
        ),
    )


class Phi3V(Processor, frozen=True):
    """Tiles of 336 pixels, up to 4 of them, and the whole image; settings are constants."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; each image has as many tiles as the largest one."""
        crops = files.image.count("num_crops", 4, most=256)
        each = files.image.count("num_img_tokens", 144, most=4096)
        images, sizes = [], []
        for image in inputs.each_image():
            rows, columns = _hd_tiles(image, crops)
            tiles = rows * columns + 1
            features = tiles * each + 1 + (rows + 1) * 12
            run = (TokenRun("image", features),)
            images.append(PlannedImage(336, 336, tiles * (336 // 14) ** 2, run, tiles))
            sizes.append((rows * 336, columns * 336))
        most = max(image.tiles for image in images)
        return ImagePlan(
            images=tuple(images),
            arrays=(
                InputArray("pixel_values", (len(images), most, CHANNELS, 336, 336), "float32"),
                InputArray("image_sizes", (len(images), 2), "int64", tuple(sizes)),
            ),
        )


def _hd_tiles(image: ImageSize, most: int) -> tuple[int, int]:
    """Rows and columns: the most columns of the longer edge that stay within the tiles."""
    long, short = max(image.width, image.height), min(image.width, image.height)
    ratio, scale = long / short, 1
    while scale * math.ceil(scale / ratio) <= most:
        scale += 1
    width = (scale - 1) * 336
    tiles = math.ceil(int(width / ratio) / 336), scale - 1
    return tiles if image.width >= image.height else (tiles[1], tiles[0])


class Mllama(Processor, frozen=True):
    """Up to four tiles of a canvas; one token, which attends to all of them."""

    side: int = 560

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; the tower is given all tiles of each image, empty ones too."""
        side = files.image.edge("size", self.side)
        most = files.image.count("max_image_tiles", 4, most=64)
        count = len(inputs.each_image())
        ids, masks = [], []
        shapes = [(w, h) for w in range(1, most + 1) for h in range(1, most + 1) if w * h <= most]
        for image in inputs.each_image():
            rows, columns = _canvas(image, shapes, side)
            ids.append(shapes.index((rows, columns)) + 1)
            masks.append(tuple(int(tile < rows * columns) for tile in range(most)))
        patches = most * ((side // 14) ** 2 + 1)
        planned = PlannedImage(side, side, patches, (TokenRun("image", 1),), most)
        return ImagePlan(
            images=(planned,) * count,
            arrays=(
                InputArray("pixel_values", (1, count, most, CHANNELS, side, side), "float32"),
                InputArray("aspect_ratio_ids", (1, count), "int64", (tuple(ids),)),
                InputArray("aspect_ratio_mask", (1, count, most), "int64", (tuple(masks),)),
            ),
        )


def _canvas(image: ImageSize, shapes: Sequence[tuple[int, int]], side: int) -> tuple[int, int]:
    """Tiles in height and width: the least enlargement, else the least reduction."""
    scales = [min(w * side / image.width, h * side / image.height) for h, w in shapes]
    larger = [scale for scale in scales if scale >= 1]
    chosen = min(larger) if larger else max(scales)
    fitting = [shape for shape, scale in zip(shapes, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda shape: shape[0] * shape[1])


class Lfm2(Processor, frozen=True):
    """One view within a budget of tokens, or tiles of 512 pixels and a small view of the whole."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; views are padded to the most patches that one may have."""
        settings = files.image
        patch = settings.count("encoder_patch_size", settings.count("patch_size", 16), most=256)
        down = settings.count("downsample_factor", 2, most=64)
        least = settings.count("min_image_tokens", 64, most=2**20)
        most = settings.count("max_image_tokens", 256, most=2**20)
        tile = settings.count("tile_size", 512, most=4096)
        tolerance = settings.ratio("max_pixels_tolerance", 2.0)
        unit = patch * down
        images, shapes = [], []
        for image in inputs.each_image():
            view = _view(image, unit, least, most)
            rows, columns = 1, 1
            if _rounded(image, unit, patch) > most * unit**2 * tolerance:
                columns, rows = grid_by_half(image, 2, 10, tile)
            tiles = rows * columns
            whole = -(-(view[0] // patch) // down) * -(-(view[1] // patch) // down)
            tokens: tuple[TokenRun, ...] = (ONE_TOKEN, TokenRun("image", whole), ONE_TOKEN)
            if tiles > 1:
                each = TokenRun("image", (-(-(tile // patch) // down)) ** 2)
                tokens = (ONE_TOKEN, *(ONE_TOKEN, each) * tiles, ONE_TOKEN, *tokens[1:])
                shapes += [(tile // patch, tile // patch)] * tiles
                tiles += 1
            shapes.append((view[0] // patch, view[1] // patch))
            patches = sum(h * w for h, w in shapes[-tiles:])
            images.append(PlannedImage(view[1], view[0], patches, tokens, tiles))
        budget = max(most * down**2, (tile // patch) ** 2)
        return ImagePlan(
            images=tuple(images),
            arrays=(
                InputArray("pixel_values", (len(shapes), budget, CHANNELS * patch**2), "float32"),
                InputArray("pixel_attention_mask", (len(shapes), budget), "int32"),
                InputArray("spatial_shapes", (len(shapes), 2), "int32", tuple(shapes)),
            ),
        )


def _view(image: ImageSize, unit: int, least: int, most: int) -> tuple[int, int]:
    """Height and width of the view within the budget; floats as the processor has them."""
    rows = max(unit, round(image.height / unit) * unit)
    columns = max(unit, round(image.width / unit) * unit)
    if rows * columns > most * unit**2:
        beta = math.sqrt((image.height * image.width) / (most * unit**2))
        rows = max(unit, math.floor(image.height / beta / unit) * unit)
        columns = max(unit, math.floor(image.width / beta / unit) * unit)
    elif rows * columns < least * unit**2:
        beta = math.sqrt(least * unit**2 / (image.height * image.width))
        rows = math.ceil(image.height * beta / unit) * unit
        columns = math.ceil(image.width * beta / unit) * unit
    return rows, columns


def _rounded(image: ImageSize, unit: int, patch: int) -> int:
    height = max(patch, round(image.height / unit) * unit)
    return height * max(patch, round(image.width / unit) * unit)


class Phi4MM(Processor, frozen=True):
    """Patches of the image within two limits, in rows as long as the most; one token."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; the settings are in config.json."""
        patch = files.config.sub("vision_config").count("patch_size", 14, most=256)
        least = files.config.count("min_num_patches", 256, most=2**16)
        most = files.config.count("max_num_patches", 3600, most=2**16)
        images, shapes = [], []
        for image in inputs.each_image():
            patches = max((image.height // patch) * (image.width // patch), 1)
            rows, columns = _rows_within(image, min(max(patches, least), most))
            shapes.append((rows, columns))
            size = columns * patch, rows * patch
            images.append(
                PlannedImage(*size, rows * columns, (TokenRun("image", 1),), 1, rows * columns - 1)
            )
        shape = (len(images), most)
        return ImagePlan(
            images=tuple(images),
            arrays=(
                InputArray("pixel_values", (*shape, CHANNELS * patch**2), "float32"),
                InputArray("pixel_attention_mask", shape, "bool_"),
                InputArray("spatial_shapes", (len(images), 2), "int64", tuple(shapes)),
            ),
        )


def _rows_within(image: ImageSize, most: int) -> tuple[int, int]:
    """Return rows and columns of at most ``most`` patches in the ratio of an image."""
    aspect = image.width / image.height
    rows = int(math.sqrt(most / aspect))
    columns = int(rows * aspect)
    while rows * columns > most:
        rows, columns = (rows - 1, columns) if rows > columns else (rows, columns - 1)
    return max(rows, 1), max(columns, 1)
