"""How processors choose a resolution for an image: from a list, or by the ratio of its sides.

Floats are those of the processors, so that both choose the same.
"""

import math
from collections.abc import Callable, Iterable

from memfit.estimators.base.images import ImageSize


def best_resolution(image: ImageSize, points: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width that keep the most of an image, then waste the least.

    Source: transformers' image_processing_utils.py, select_best_resolution.
    """
    best, most, least = (0, 0), 0, math.inf
    for height, width in points:
        scale = min(width / image.width, height / image.height)
        scaled = int(image.width * scale) * int(image.height * scale)
        kept = min(scaled, image.width * image.height)
        wasted = width * height - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (height, width), kept, wasted
    return best


def unpadded(image: ImageSize, rows: int, columns: int, patches: int) -> tuple[int, int]:
    """Return the rows and columns of features of all tiles without the padding.

    ``patches`` are those of a tile in each direction. Source: transformers'
    models/llava_next/processing_llava_next.py, _get_unpadded_features.
    """
    height, width = patches * rows, patches * columns
    if image.width / image.height > width / height:
        inner = int(round(image.height * (width / image.width), 7))
        height -= (height - inner) // 2 * 2
    else:
        inner = int(round(image.width * (height / image.height), 7))
        width -= (width - inner) // 2 * 2
    return height, width


def closest_grid(
    image: ImageSize, least: int, most: int, wins: Callable[[int, int], bool]
) -> tuple[int, int]:
    """Return the columns and rows of tiles, ``least`` to ``most``, with the ratio of an image.

    Of two grids that are equally close, ``wins`` is given the tiles of the later and the earlier.
    """
    # In the order in which Python keeps the processors' set.
    grids = {
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    }
    aspect, best, closest = image.width / image.height, (1, 1), math.inf
    for columns, rows in sorted(grids, key=math.prod):
        gap = abs(aspect - columns / rows)
        if gap < closest or (gap == closest and wins(columns * rows, math.prod(best))):
            best = columns, rows
        closest = min(closest, gap)
    return best


def grid_by_half(image: ImageSize, least: int, most: int, side: int) -> tuple[int, int]:
    """Return the columns and rows of tiles; of equal ones more, if less than half stays empty."""
    return closest_grid(image, least, most, lambda count, _: 2 * image.pixels > side**2 * count)
