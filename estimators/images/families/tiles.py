"""Processors that divide an image into tiles of one size: Idefics 3, LLaVA-NeXT, Phi-3-vision,
Llama 3.2 Vision and LFM2-VL; crops.py has more.

Sources: mlx_vlm/models/*/processing_*.py of idefics3, smolvlm, llava_next, phi3_v, phi4mm, mllama,
lfm2_vl, granite_vision, granite4_vision, kimi_vl, kimi_k25 and idefics2; transformers'
image_processing_pil_*.py of idefics3 (also of smolvlm), idefics2, llava_next and mllama.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.units import ceil_div
from memfit.estimators.images.families.fitting import best_resolution, grid_by_half, unpadded
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import FileSettings, Processor, ProcessorFiles

_ONE = TokenRun("text", 1)


class Idefics3(Processor, frozen=True):
    """Rows and columns of tiles, each after a tag, and the whole image as one more tile."""

    longest: int
    tile: int
    features: int
    patch: int = 14

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; the array is as long as the most tiles of an image."""
        tile = files.image.sub("max_image_size").count("longest_edge", self.tile, most=4096)
        longest = files.image.sub("size").count("longest_edge", self.longest, most=2**16)
        features = files.processor.count("image_seq_len", self.features, most=2**20)
        splits = files.image.flag("do_image_splitting", default=True)
        tags = _added_tags(files.tokenizer)
        images = []
        for image in inputs.each_image():
            rows, columns = _rows_and_columns(image, longest, tile) if splits else (0, 0)
            tiles = rows * columns + 1
            run = TokenRun("image", features)
            tokens: list[TokenRun] = []
            for row in range(rows):
                for column in range(columns):
                    tag = f"<row_{row + 1}_col_{column + 1}>"
                    tokens += [TokenRun("text", 1 + (1 if tag in tags else len(tag))), run]
                tokens.append(_ONE)  # a line break
            whole = 1 if "<global-img>" in tags else len("<global-img>")
            tokens += [TokenRun("text", 1 + whole + bool(rows)), run, _ONE]
            patches = tiles * (tile // self.patch) ** 2
            images.append(PlannedImage(tile, tile, patches, tuple(tokens), tiles))
        together = sum(image.tiles for image in images)
        shape = (1, together, CHANNELS, tile, tile)
        return ImagePlan(
            images=tuple(images),
            arrays=(
                InputArray("pixel_values", shape, "float32"),
                InputArray("pixel_attention_mask", (1, together, tile, tile), "int64"),
            ),
            tokens_are_bound="<row_1_col_1>" not in tags,
        )


def _added_tags(tokenizer: FileSettings) -> set[str]:
    """The tags of rows and columns that are one token each."""
    added = tokenizer.sub("added_tokens_decoder").values.values()
    more = tokenizer.values.get("additional_special_tokens")
    more = more if isinstance(more, list) else []
    contents = (token.get("content") if isinstance(token, dict) else token for token in added)
    listed = (token.get("content") if isinstance(token, dict) else token for token in more)
    return {text for text in (*contents, *listed) if isinstance(text, str)}


def _rows_and_columns(image: ImageSize, longest: int, tile: int) -> tuple[int, int]:
    """Tiles of an image with its longer edge scaled to ``longest``, and to 4096 at most."""
    aspect = image.width / image.height
    most = 4096
    if image.width >= image.height:
        width, height = longest, int(longest / aspect)
        height = max(height + height % 2, 1)
        if width > most:
            width, height = most, max(int(most / width / height), 1)
    else:
        width, height = int(longest * aspect), longest
        width = max(width + width % 2, 1)
        if height > most:
            width, height = max(int(most * width / height), 1), most
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / aspect) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * aspect) / tile) * tile
    if height <= tile and width <= tile:
        return 0, 0
    return height // tile, width // tile


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
            tokens: tuple[TokenRun, ...] = (_ONE, TokenRun("image", whole), _ONE)
            if tiles > 1:
                each = TokenRun("image", (-(-(tile // patch) // down)) ** 2)
                tokens = (_ONE, *(_ONE, each) * tiles, _ONE, *tokens[1:])
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


class KimiVL(Processor, frozen=True):
    """Patches of the image as it is, cut to whole merged patches, within a limit."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; the settings are in config.json."""
        section = files.config.sub("vision_config")
        patch = section.count("patch_size", 14, most=256)
        limit = section.count("in_token_limit", 4096, most=2**24)
        merge = section.pair("merge_kernel_size", 2)
        grids = []
        for image in inputs.each_image():
            width, height = image.width, image.height
            if (patches := (width // patch) * (height // patch)) > limit:
                scale = math.sqrt(limit / patches)
                width, height = int(width * scale), int(height * scale)
            unit = merge[0] * patch, merge[1] * patch
            grids.append((height // unit[0] * merge[0], width // unit[1] * merge[1]))
        return _patch_rows(grids, patch, merge)


class KimiK25(Processor, frozen=True):
    """Patches of the image as it is, filled to whole merged patches, within two limits."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; the settings are a section of preprocessor_config.json."""
        section = files.image.sub("media_proc_cfg")
        patch = section.count("patch_size", 14, most=256)
        limit = section.count("in_patch_limit", 16384, most=2**24)
        longest = patch * section.count("patch_limit_on_one_side", 512, most=2**16)
        merge = section.pair("merge_kernel_size", 2)
        grids = []
        for image in inputs.each_image():
            width, height = image.width, image.height
            patches = max(1.0, width // patch) * max(1.0, height // patch)
            scale = min(1.0, math.sqrt(limit / patches), longest / width, longest / height)
            width, height = (min(max(1, int(side * scale)), longest) for side in (width, height))
            rows = ceil_div(height, merge[0] * patch) * merge[0]
            grids.append((rows, ceil_div(width, merge[1] * patch) * merge[1]))
        return _patch_rows(grids, patch, merge)


def _patch_rows(grids: Sequence[tuple[int, int]], patch: int, merge: tuple[int, int]) -> ImagePlan:
    """Return the plan of images as rows and columns of patches, of which some become one token."""
    images = tuple(
        PlannedImage(
            width=columns * patch,
            height=rows * patch,
            patches=rows * columns,
            tokens=(TokenRun("image", rows * columns // math.prod(merge)),),
        )
        for rows, columns in grids
    )
    patches = sum(image.patches for image in images)
    return ImagePlan(
        images=images,
        arrays=(
            InputArray("pixel_values", (patches, CHANNELS, patch, patch), "float32"),
            InputArray("image_grid_hws", (len(images), 2), "int32", tuple(grids)),
        ),
    )


class Idefics2(Processor, frozen=True):
    """The image and its four quarters, each as large as it is within two limits."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; all arrays are as large as the largest image or quarter."""
        size = files.image.sub("size")
        limits = (
            size.count("shortest_edge", 378, most=4096),
            size.count("longest_edge", 980, most=4096),
        )
        features = files.processor.count("image_seq_len", 64, most=2**20)
        splits = files.image.flag("do_image_splitting", default=True)
        sizes = []
        for image in inputs.each_image():
            if splits and min(image.height, image.width) < 2:
                raise InputError(f"image {image}: the model's processor divides it to nothing")
            height, width = image.height, image.width
            parts = product((height // 2, height - height // 2), (width // 2, width - width // 2))
            all_parts = ((height, width), *(parts if splits else ()))
            sizes.append([_within(part, limits) for part in all_parts])
        height, width = (max(size[i] for image in sizes for size in image) for i in (0, 1))
        count = 5 if splits else 1
        # A token is between images, and at both ends.
        one = (TokenRun("image", features), _ONE) * count
        patches = count * (height // 14) * (width // 14)
        images = tuple(
            PlannedImage(width, height, patches, (_ONE, *one) if number == 0 else one, count)
            for number in range(len(sizes))
        )
        shape = (1, count * len(images))
        return ImagePlan(
            images=images,
            arrays=(
                InputArray("pixel_values", (*shape, CHANNELS, height, width), "float32"),
                InputArray("pixel_attention_mask", (*shape, height, width), "int64"),
            ),
        )


def _within(size: tuple[int, int], limits: tuple[int, int]) -> tuple[int, int]:
    """Return height and width with the longer side reduced, then each at least the shortest."""
    (height, width), (least, most) = size, limits
    aspect = width / height
    if width >= height and width > most:
        width, height = most, int(most / aspect)
    elif height > width and height > most:
        height, width = most, int(most * aspect)
    return max(height, least), max(width, least)
