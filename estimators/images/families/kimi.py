"""Kimi-VL and Kimi K2.5: patches of the image as it is, to whole merged patches, within limits.

Sources: mlx_vlm/models/kimi_vl and kimi_k25.
"""

import math
from collections.abc import Sequence

from memfit.estimators.base.images import Images
from memfit.estimators.base.units import ceil_div
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import Processor, ProcessorFiles


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
