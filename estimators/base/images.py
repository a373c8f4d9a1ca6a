"""The images and videos of a prompt, by their sizes; nothing else of them changes the memory."""

from typing import Annotated

from msgspec import Meta, Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Tokens

MOST_PIXELS_A_SIDE = 2**16
MOST_IMAGES = 4096
Side = Annotated[int, Meta(ge=1, le=MOST_PIXELS_A_SIDE)]
Number = Annotated[int, Meta(ge=1, le=MOST_IMAGES)]


class ImageSize(Struct, frozen=True, forbid_unknown_fields=True):
    """Pixels of an image as it is given, and how many such images there are.

    Raises:
        InputError: when a number is out of range.
    """

    width: Side
    height: Side
    count: Number = 1

    def __post_init__(self) -> None:
        _require_sides(self.width, self.height)
        if not 1 <= self.count <= MOST_IMAGES:
            raise InputError(f"{self}: give from 1 to {MOST_IMAGES} images")

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def __str__(self) -> str:
        many = f" x{self.count}" if self.count > 1 else ""
        return f"{self.width}x{self.height}{many}"


class VideoSize(Struct, frozen=True, forbid_unknown_fields=True):
    """The frames of a video that the processor is given, and their pixels.

    Raises:
        InputError: when a number is out of range.
    """

    frames: Number
    width: Side
    height: Side

    def __post_init__(self) -> None:
        _require_sides(self.width, self.height)
        if not 1 <= self.frames <= MOST_IMAGES:
            raise InputError(f"{self}: a video has from 1 to {MOST_IMAGES} frames")

    def __str__(self) -> str:
        return f"{self.frames}x{self.width}x{self.height}"


class Images(Struct, frozen=True, forbid_unknown_fields=True):
    """What a prompt has in addition to text.

    Raises:
        InputError: when there are none or too many.
    """

    images: tuple[ImageSize, ...] = ()
    videos: tuple[VideoSize, ...] = ()
    tokens: Tokens = 0
    """Their tokens in the prompt by the model's processor; 0 before the model is known."""

    def __post_init__(self) -> None:
        count = sum(image.count for image in self.images)
        if not 1 <= count + len(self.videos) <= MOST_IMAGES:
            raise InputError(f"{count} images: give from 1 to {MOST_IMAGES}")

    def __str__(self) -> str:
        videos = (f"video {video}" for video in self.videos)
        return ", ".join((*map(str, self.images), *videos))

    def each_image(self) -> tuple[ImageSize, ...]:
        """Return every image by itself."""
        return tuple(
            ImageSize(size.width, size.height) for size in self.images for _ in range(size.count)
        )


def _require_sides(width: int, height: int) -> None:
    if not all(1 <= side <= MOST_PIXELS_A_SIDE for side in (width, height)):
        raise InputError(
            f"{width}x{height} pixels: a side has from 1 to {MOST_PIXELS_A_SIDE} of them"
        )
