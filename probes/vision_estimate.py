"""The estimate for a prompt with an image: the vision tower is loaded too."""

from collections import Counter

from msgspec.structs import replace

from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.sized_model import SizedModel


def with_tower(sized: SizedModel) -> SizedModel:
    """Return a model with every tensor of its checkpoint loaded, as mlx-vlm does."""
    sizes = Counter(tensor.nbytes for tensor in sized.checkpoint.tensors or ())
    return sized.with_footprint(replace(sized.footprint, sizes=sizes))


def do_not_save(measurement: Measurement) -> None:
    """Save nothing: a measurement of mlx-vlm is not valid for mlx-lm."""


def image_note(mlx_vlm_version: str) -> Note:
    """Return the note on a measurement with an image."""
    return Note(
        "info",
        "image",
        f"run by mlx-vlm {mlx_vlm_version}, which loads the vision tower; the tower's memory for"
        " the image is measured, not estimated, and the measurement is not saved for estimates",
    )
