"""What a processor makes of images: tokens of the prompt, and arrays that the model is given."""

from typing import Any, Literal

from msgspec import Struct

CHANNELS = 3
"""Of the pixels of an image: red, green and blue."""


class TokenRun(Struct, frozen=True):
    """Tokens of one kind that follow each other in the prompt."""

    kind: Literal["image", "video", "text", "image_end"]
    """What they are: placeholders, which features replace, or other tokens."""
    count: int


class InputArray(Struct, frozen=True):
    """An array that the model is given with the ids."""

    name: str
    """As mlx-vlm's processor names it, such as ``pixel_values``."""
    shape: tuple[int, ...]
    dtype: str
    """As MLX names it."""
    values: tuple[Any, ...] = ()
    """The nested values of an array that the model computes sizes from; () for pixels."""


class PlannedImage(Struct, frozen=True):
    """One image or video after the processor."""

    width: int
    """Pixels after resizing, of a tile where the image is divided into tiles."""
    height: int
    patches: int
    """Of all tiles and frames together: the sequence of the vision tower."""
    tokens: tuple[TokenRun, ...]
    """In their order in the prompt, without what the chat template adds."""
    tiles: int = 1
    """Images of this size that the vision tower is given: tiles, crops or frames."""
    added: int = 0
    """Positions by which the class lengthens the prompt: features for one placeholder."""

    @property
    def token_count(self) -> int:
        """Tokens of the prompt."""
        return sum(run.count for run in self.tokens)

    @property
    def feature_count(self) -> int:
        """Tokens that features of the vision tower replace, and those that it adds."""
        replaced = (run.count for run in self.tokens if run.kind in ("image", "video"))
        return self.added + sum(replaced)


class ImagePlan(Struct, frozen=True):
    """All images of a prompt after the processor."""

    images: tuple[PlannedImage, ...]
    """In the order of the question, videos last."""
    arrays: tuple[InputArray, ...]
    """Arrays with the same name are a list of arrays."""
    is_assumed: bool = False
    """Whether the processor's files are missing, so that the family's published settings count."""
    tokens_are_bound: bool = False
    """Whether a tag around the images may be fewer tokens than are counted."""

    @property
    def token_count(self) -> int:
        """Tokens of the prompt that are of its images."""
        return sum(image.token_count for image in self.images)

    @property
    def added(self) -> int:
        """Positions by which the class lengthens the prompt."""
        return sum(image.added for image in self.images)
