"""How large images may be on a machine, how many fit, and what smaller ones save."""

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.workload import Workload
from memfit.estimators.images.processor import with_image_tokens
from memfit.estimators.results.advice import ImageAdvice, SmallerImages
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.sizing.search import first_fitting, fits_comfortably
from memfit.estimators.sizing.sized_model import SizedModel

MOST_IMAGES = 256
# Each number of images is a trace of its own where no formula has the tower's work.
_MOST_TRACED = 4
# Classes compute with pixels that a trace has in memory: 600 MB for this many tokens (Idefics 3).
_MOST_TRACED_TOKENS = 10_000
LONGEST_SIDE = 16384
SIDE_STEP = 32


def image_advice(sized: SizedModel, workload: Workload) -> ImageAdvice | None:
    """Return the advice on the images of a workload, by formula where there is one: it is faster.

    It is None without images, without a machine, and where neither formula nor trace has them.
    """
    if not workload.images or not workload.images.images or sized.device is None:
        return None
    sized, first = sized.formula_view(), workload.images.images[0]
    try:
        sized.figures_for(workload)
    except UnsupportedError:
        return None

    def most(limit: int, of: Callable[[int], Images]) -> int:
        def fits(number: int) -> bool:
            return fits_comfortably(sized, with_images(sized, workload, of(number)))

        # The limit first: it fits most machines, and a trace takes a while.
        others = range(limit - 1, 0, -1)
        return first_fitting((limit,), fits) or first_fitting(others, fits, monotone=True) or 0

    longest = most(LONGEST_SIDE // SIDE_STEP, lambda steps: _one(first, steps))
    searched = MOST_IMAGES
    if isinstance(sized.runtime_model.source, Interpolated):
        each = max(1, workload.image_tokens // len(workload.images.each_image()))
        searched = max(1, min(_MOST_TRACED, _MOST_TRACED_TOKENS // each))
    return ImageAdvice(
        largest=_one(first, longest).images[0] if longest else None,
        any_size=longest == LONGEST_SIDE // SIDE_STEP,
        most=most(searched, lambda count: Images((replace(first, count=count),))),
        searched=searched,
        smaller=tuple(_smaller(sized, workload)),
    )


def with_images(sized: SizedModel, workload: Workload, images: Images) -> Workload:
    """Return a workload with other images and the same text.

    Raises:
        InputError: when the processor refuses one of them.
    """
    text = workload.prompt_tokens - workload.image_tokens
    return with_image_tokens(sized.checkpoint, replace(workload, prompt_tokens=text, images=images))


def _one(first: ImageSize, steps: int) -> Images:
    """One image in the ratio of the first, with a longer side of ``steps``."""
    longest = max(first.width, first.height)
    sides = (max(1, side * steps * SIDE_STEP // longest) for side in (first.width, first.height))
    return Images((ImageSize(*sides),))


def _smaller(sized: SizedModel, workload: Workload) -> Iterator[SmallerImages]:
    assert workload.images
    least = sized.figures_for(workload).moment.nbytes
    for divisor in (2, 4):
        images = replace(
            workload.images,
            images=tuple(
                replace(
                    size, width=max(1, size.width // divisor), height=max(1, size.height // divisor)
                )
                for size in workload.images.images
            ),
        )
        try:
            reduced = with_images(sized, workload, images)
            peak = sized.figures_for(reduced).moment.nbytes
        except (InputError, UnsupportedError):
            return
        if peak < least:
            least = peak
            yield SmallerImages(divisor, reduced.image_tokens, peak)
