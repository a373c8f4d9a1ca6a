"""Idefics 2 and 3 and SmolVLM: rows and columns of tiles with their tags, or the four quarters.

Sources: mlx_vlm/models/*/processing_*.py of idefics2, idefics3 and smolvlm; transformers'
image_processing_pil_*.py of idefics2 and idefics3 (also of smolvlm).
"""

import math
from itertools import product

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.images.plan import CHANNELS, ImagePlan, InputArray, PlannedImage, TokenRun
from memfit.estimators.images.settings import ONE_TOKEN, FileSettings, Processor, ProcessorFiles


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
                tokens.append(ONE_TOKEN)  # a line break
            whole = 1 if "<global-img>" in tags else len("<global-img>")
            tokens += [TokenRun("text", 1 + whole + bool(rows)), run, ONE_TOKEN]
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
        one = (TokenRun("image", features), ONE_TOKEN) * count
        patches = count * (height // 14) * (width // 14)
        images = tuple(
            PlannedImage(width, height, patches, (ONE_TOKEN, *one) if number == 0 else one, count)
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
