"""Molmo and Molmo 2: the whole image, and crops that overlap, with pooled patches.

Sources: mlx_vlm/models/molmo and molmo2.
"""

import math
from array import array
from collections.abc import Iterator

from memfit.estimators.base.errors import ConfigError
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.units import ceil_div
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import ONE_TOKEN, Processor, ProcessorFiles


class Molmo(Processor, frozen=True):
    """The whole image, and up to 12 crops that overlap; patches are pooled two by two."""

    side: int = 336
    patch: int = 14
    crops: int = 12
    margins: tuple[int, int] = (4, 4)
    """Patches that a crop shares with its neighbours."""
    pooled: int = 12
    """Tokens of a row of the whole image, and rows."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        (image,) = inputs.each_image()
        side = files.image.pair("base_image_input_size", self.side)[0]
        patch = files.image.count("image_patch_size", self.patch, most=256)
        most = files.image.count("max_crops", self.crops, most=64)
        pooled = (
            files.image.count("image_token_length_h", self.pooled, most=64),
            files.image.count("image_token_length_w", self.pooled, most=64),
        )
        margin = sum(self.margins)
        window = side // patch - margin
        if window < 1:
            raise ConfigError(f"{files.image.reading.name}: crops of {side} pixels leave nothing")
        grid = _least_enlarged(image, window * patch, margin * patch, most)
        rows, columns = (ceil_div(count * window + margin, 2) for count in grid)
        tiles = math.prod(grid) + 1
        patches = (side // patch) ** 2
        tokens = (*_lines(*pooled), *_lines(rows, columns))
        places = self._places(grid, window, pooled, columns)
        shape = (tiles, patches)
        return ImagePlan(
            images=(PlannedImage(side, side, tiles * patches, tokens, tiles),),
            arrays=(
                InputArray("pixel_values", (*shape, CHANNELS * patch**2), "float32"),
                InputArray("image_input_idx", (tiles, math.prod(pooled)), "int32", places),
                InputArray("image_masks", shape, "float32"),
            ),
        )

    def _places(
        self, grid: tuple[int, int], window: int, pooled: tuple[int, int], columns: int
    ) -> tuple[tuple[int, ...], ...]:
        """The token that each feature of the whole and of each crop goes to, -100 for none."""
        height, width = pooled
        whole = tuple(1 + y * (width + 1) + x for y in range(height) for x in range(width))
        first = 3 + height * (width + 1)
        rows = [self._kept(crop, grid[0], window) for crop in range(grid[0])]
        across = [self._kept(crop, grid[1], window) for crop in range(grid[1])]
        # In the order of the image: lines of tokens go through all crops of a row.
        cells = sorted(
            (i, y, j, x)
            for i, down in enumerate(rows)
            for j, along in enumerate(across)
            for y in down
            for x in along
        )
        tokens = {
            cell: first + index // columns * (columns + 1) + index % columns
            for index, cell in enumerate(cells)
        }
        crops = (
            tuple(tokens.get((i, y, j, x), -100) for y in range(height) for x in range(width))
            for i in range(grid[0])
            for j in range(grid[1])
        )
        return (whole, *crops)

    def _kept(self, crop: int, crops: int, window: int) -> range:
        """The rows or columns of a crop that no crop before it has, pooled."""
        before, after = self.margins
        start = before // 2 if crop else 0
        length = window + before * (not crop) + after * (crop == crops - 1)
        return range(start, start + ceil_div(length, 2))


class Molmo2(Molmo, frozen=True):
    """As Molmo, with several images and the places of pooled patches for each token."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        side = files.image.edge("size", 378)
        patch = files.image.count("patch_size", self.patch, most=256)
        most = files.image.count("max_crops", 8, most=64)
        before, after = files.image.pair("overlap_margins", 4)
        down, across = files.image.pair("pooling_size", 2)
        window = side // patch - before - after
        if window < 1:
            raise ConfigError(f"{files.image.reading.name}: crops of {side} pixels leave nothing")
        images, grids = [], []
        for image in inputs.each_image():
            grid = _least_enlarged(image, window * patch, (before + after) * patch, most)
            whole = ceil_div(side // patch, down), ceil_div(side // patch, across)
            long = [count * window + before + after for count in grid]
            rows, columns = ceil_div(long[0], down), ceil_div(long[1], across)
            grids.append((*whole, rows, columns))
            tokens = (*_lines(*whole), *_lines(rows, columns))
            tiles = math.prod(grid) + 1
            patches = tiles * (side // patch) ** 2
            images.append(PlannedImage(side, side, patches, tokens, tiles))
        tiles = sum(image.tiles for image in images)
        pooled = sum(image.feature_count for image in images)
        patches = (side // patch) ** 2
        counts = tuple(image.tiles for image in images)
        return ImagePlan(
            images=tuple(images),
            arrays=(
                InputArray("pixel_values", (tiles, patches, CHANNELS * patch**2), "float32"),
                InputArray("image_token_pooling", (pooled, down * across), "int64"),
                InputArray("image_grids", (len(images), 4), "int32", tuple(grids)),
                InputArray("image_num_crops", (len(images),), "int64", counts),
            ),
        )


def _lines(rows: int, columns: int) -> Iterator[TokenRun]:
    """Tokens of an image between a start and an end, each row with a break."""
    yield ONE_TOKEN
    for _ in range(rows):
        yield TokenRun("image", columns)
        yield ONE_TOKEN
    yield TokenRun("image_end", 1)


def _least_enlarged(image: ImageSize, window: int, margin: int, most: int) -> tuple[int, int]:
    """Rows and columns of crops: the least enlargement, else the least reduction, in float32."""
    shapes = [(h, w) for h in range(1, most + 1) for w in range(1, most + 1) if h * w <= most]
    shapes.sort(key=lambda shape: (math.prod(shape), shape[0]))
    height, width = image.height - margin, image.width - margin
    scales = array(
        "f", (min(_over(h * window, height), _over(w * window, width)) for h, w in shapes)
    )
    if all(scale < 1 for scale in scales):
        return shapes[max(range(len(shapes)), key=scales.__getitem__)]
    return shapes[min(range(len(shapes)), key=lambda i: math.inf if scales[i] < 1 else scales[i])]


def _over(length: int, whole: int) -> float:
    return length / whole if whole else math.inf
