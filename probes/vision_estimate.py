"""The estimate for a prompt with images, which mlx-vlm runs."""

from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, MachineError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.processor import image_plan
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.runtimes.registry import as_installed, runtime_for_images
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import SizedModel


def sized_for_images(
    checkpoint: Checkpoint, device: Device, workload: Workload, *, margin_bytes: int
) -> SizedModel:
    """Return a model as mlx-vlm runs it, by trace of its class where there is one."""
    catalog = Catalog(versioned=as_installed)
    model = catalog.add(checkpoint)
    runtime = runtime_for_images(catalog.native_runtime(model))
    sized = partial(catalog.sized, model, device=device, runtime=runtime, margin_bytes=margin_bytes)
    try:
        return sized(method="trace")
    except (MachineError, UnsupportedError):
        return sized()


def known_images(sized: SizedModel, workload: Workload) -> Workload:
    """Return a workload of a whole prompt with how many of its tokens are of images.

    It has no images where the processor or the tower is not described.
    """
    if not workload.images:
        return workload
    try:
        tokens = image_plan(sized.checkpoint, workload.images).token_count
        known = replace(workload, images=replace(workload.images, tokens=tokens))
        sized.figures_for(known)
    except (InputError, UnsupportedError):
        return replace(workload, images=UNSET)
    return known


def do_not_save(measurement: Measurement) -> None:
    """Save nothing: the workload does not say all that was run."""


def image_note(sized: SizedModel, workload: Workload, mlx_vlm_version: str) -> Note:
    tower = "is without the work of the vision tower, and the measurement is not saved"
    if workload.images:
        basis, _ = sized.runtime_model.basis("workspace", workload)
        tower = "is traced" if basis == "traced" else "is an upper bound by formula"
    return Note("info", "image", f"run by mlx-vlm {mlx_vlm_version}; the estimate {tower}")
