"""What an estimate says of images: their tokens, how many fit, and what smaller ones save."""

from collections.abc import Iterator

from memfit.cli.render.views.text import size
from memfit.estimators.base.images import ImageSize
from memfit.estimators.base.units import Units
from memfit.estimators.results.context import ContextPlan
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.results.images import ImageAdvice


def image_lines(result: Estimate | ContextPlan, units: Units) -> tuple[str, ...]:
    """Return the lines of a prompt with images, nothing for one of text."""
    asked = result.workload.images
    if not asked:
        return ()
    tokens = f"{asked}: {asked.tokens} of the {result.workload.prompt_tokens} tokens"
    advice = _advice(asked.images[0], result.images, units) if result.images else ()
    return (tokens, *advice)


def _advice(first: ImageSize, advice: ImageAdvice, units: Units) -> Iterator[str]:
    if advice.largest is None:
        yield "not even a small image fits with this prompt"
    elif advice.any_size:
        yield "an image of any size fits: the model's processor reduces it"
    else:
        yield f"the largest of this shape that fits: {advice.largest}"
    if advice.most:
        many = f"{advice.most} or more" if advice.most == advice.searched else str(advice.most)
        yield f"images of {first.width}x{first.height} that fit together: {many}"
    for each in advice.smaller:
        sides = f"{max(1, first.width // each.divisor)} {max(1, first.height // each.divisor)}"
        yield (
            f"mlx_vlm.generate --resize-shape {sides}: {each.image_tokens} tokens, peak"
            f" {size(each.peak_bytes, units)}"
        )
