"""What a prompt with an image changes: the tower is loaded, and little else is known."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.sized_model import SizedModel


def with_tower(sized: SizedModel) -> SizedModel:
    """Return a model with every tensor of its checkpoint loaded, as mlx-vlm does."""
    sizes = Counter(tensor.nbytes for tensor in sized.checkpoint.tensors or ())
    return sized.with_footprint(replace(sized.footprint, sizes=sizes))


def forget(measurement: Measurement) -> None:
    """Keep nothing: what mlx-vlm took is no answer to what mlx-lm will take."""


def notes(mlx_vlm_version: str) -> Iterator[Note]:
    """Yield what is to be known of a measurement with an image."""
    yield Note(
        "info",
        "image",
        f"run by mlx-vlm {mlx_vlm_version}, which loads the vision tower; what the tower takes to"
        " see the image is measured, not estimated, and the measurement is not kept for estimates",
    )
