"""Pixtral and Mistral 3: patches of the image as it is, up to a longest edge, and row breaks.

Sources: mlx_vlm/models/pixtral/image_processing_pixtral.py, pixtral/processing_pixtral.py and
mistral3/processing_mistral3.py.
"""

import math

from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import ONE_TOKEN, Processor, ProcessorFiles


class Pixtral(Processor, frozen=True):
    """One family; its sizes are those of its published models."""

    longest: int
    patch: int
    merge: int

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan; the array is as large as the largest image."""
        patch = files.processor.edge("patch_size", self.patch)
        merge = files.processor.count("spatial_merge_size", self.merge, most=64)
        most = files.image.pair("size", self.longest)
        images = tuple(_planned(image, most, patch, merge) for image in inputs.each_image())
        height = max(image.height for image in images)
        width = max(image.width for image in images)
        return ImagePlan(
            images=images,
            arrays=(
                InputArray("pixel_values", (len(images), CHANNELS, height, width), "float32"),
                InputArray(
                    "image_sizes",
                    (len(images), 2),
                    "int64",
                    tuple((image.height, image.width) for image in images),
                ),
            ),
        )


def _planned(image: ImageSize, most: tuple[int, int], patch: int, merge: int) -> PlannedImage:
    height, width = image.height, image.width
    ratio = max(height / most[0], width / most[1])
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    # A side of no pixel is left with no patch, as the processor's own arithmetic has it.
    unit = patch * merge
    rows, columns = (height - 1) // unit + 1, (width - 1) // unit + 1
    line = (TokenRun("image", columns), ONE_TOKEN)  # a break, or the end
    return PlannedImage(
        width=columns * unit,
        height=rows * unit,
        patches=rows * columns * merge**2,
        tokens=line * rows,
    )
