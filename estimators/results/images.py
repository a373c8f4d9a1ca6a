"""What a machine has room for in addition to a text: larger images, more of them, smaller ones."""

from msgspec import Struct

from memfit.estimators.base.images import ImageSize
from memfit.estimators.base.quantities import Bytes, Count, Tokens


class SmallerImages(Struct, frozen=True):
    """All images of the request, each reduced by a whole number."""

    divisor: Count
    image_tokens: Tokens
    peak_bytes: Bytes


class ImageAdvice(Struct, frozen=True):
    """Answers about the images of a request; its text stays as it is."""

    largest: ImageSize | None
    """The largest image with the sides in the ratio of the first one that fits, None: none does."""
    any_size: bool
    """Whether an image of any size fits, because the processor reduces it."""
    most: Count
    """How many images such as the first one fit, at most ``searched``."""
    searched: Count
    """How many images were tried: 256, or 1 to 4 where each number has to be traced."""
    smaller: tuple[SmallerImages, ...]
    """With sides of a half and of a quarter, where that lowers the peak."""
