"""The answers on images: each is at the limit of what fits, and smaller images save memory."""

from pathlib import Path

from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.image_advice import image_advice, with_images
from memfit.estimators.sizing.resolved import resolved
from memfit.estimators.sizing.search import fits_comfortably

SAMPLES = Path(__file__).parents[2] / "sample_configs"


def test_the_largest_image_and_the_most_images_are_at_the_limit() -> None:
    sized = Catalog().sized(str(SAMPLES / "qwen3-vl-4b.yaml"), device=memory_device(2**34))
    question = WorkloadQuestion(prompt_tokens=2048, image=(ImageSize(1024, 768),))
    target = resolved(sized, question, keeps_runtime=False)
    sized, run = target.sized, target.workload
    advice = image_advice(sized, run)
    assert advice is not None
    assert advice.largest is not None

    def fits(image: ImageSize) -> bool:
        return fits_comfortably(sized, with_images(sized, run, Images((image,))))

    width, height = advice.largest.width, advice.largest.height
    assert fits(advice.largest)
    assert not fits(ImageSize(width + 32, height + 24))
    assert fits(ImageSize(1024, 768, advice.most))
    assert not fits(ImageSize(1024, 768, advice.most + 1))
    assert not advice.any_size
    peaks = [each.peak_bytes for each in advice.smaller]
    assert sorted(peaks, reverse=True) == peaks
    assert peaks[0] < sized.figures_for(run).moment.nbytes
