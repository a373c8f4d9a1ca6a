"""A model with the workload that is asked of it: the tokens of images depend on both."""

from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.registry import runtime_for_images
from memfit.estimators.sizing.sized_model import SizedModel, require_images, with_runtime
from memfit.estimators.sizing.workload import PartialWorkload


def prompted(
    sized: SizedModel, asked: PartialWorkload, *, keeps_runtime: bool
) -> tuple[SizedModel, Workload]:
    """Return the model and its workload, with the tokens of images.

    With images the model is put under a runtime that takes them, unless it ``keeps_runtime``.

    Raises:
        InputError: when the model's processor refuses an image, or the model takes none.
        UnsupportedError: when the runtime takes no images, or the processor is not described.
    """
    if asked.values.images and not keeps_runtime:
        sized = with_runtime(sized, runtime_for_images(sized.runtime_model.runtime))
    require_images(sized, asked.values)
    run = asked.under(sized.runtime_model.runtime)
    if not run.images:
        return sized, run
    # The rules of all image processors, which other prompts need not.
    from memfit.estimators.images.processor import with_image_tokens

    return sized, with_image_tokens(sized.checkpoint, run)
