"""A model with the workload that it is to run, resolved once and passed whole."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import Version
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.questions.target import MARGIN_BYTES, Draft, Ranks
from memfit.estimators.runtimes.facets import ProgramContext
from memfit.estimators.runtimes.registry import runtime_for_images
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.ranks import RankedModel, ranked
from memfit.estimators.sizing.sized_model import (
    SizedModel,
    require_cached,
    require_images,
    settled_for,
    with_runtime,
)


class TargetQuestion(Struct, frozen=True, kw_only=True):
    """A model, where and how it runs, and its workload, before anything is read."""

    reference: str = ""
    """The catalog's name of the model; empty where each of several models takes its place."""
    workload: WorkloadQuestion = WorkloadQuestion()
    device: Device | None = None
    runtime: Runtime | None = None
    """None for the native runtime of the checkpoint, or the one that takes its images."""
    keeps_runtime: bool = True
    """Whether images that the given runtime does not take are refused."""
    mlx_version: Version | None = None
    """None for the runtime's own; the same for mlx-lm."""
    mlx_lm_version: Version | None = None
    quantize: Quantization | None = None
    """A conversion by mlx_lm.convert before the run; None for the model as it is."""
    adapter: Path | None = None
    """The directory of a LoRA adapter that is loaded with the model."""
    margin_bytes: int = MARGIN_BYTES
    """Memory to keep free above the peak."""
    ranks: Ranks | None = None
    """None for one process with the whole model."""
    as_type: str | None = None
    """The model type to assume in place of the config's own."""
    draft: Draft | None = None
    method: MethodSetting = "auto"


class ResolvedTarget(Struct, frozen=True):
    """The answer to a question about what runs where; all figures are computed from it."""

    sized: SizedModel
    """The model; over several ranks the part of the rank that decides."""
    workload: Workload
    """With the runtime's defaults, and the tokens of images."""
    device: Device | None
    """The machine as the runtime uses it."""
    ranks: RankedModel
    """The model over all its ranks."""


def resolved(
    sized: SizedModel,
    requested: WorkloadQuestion,
    ranks: Ranks | None = None,
    *,
    keeps_runtime: bool,
    deciding: Callable[[RankedModel, Workload], SizedModel] = RankedModel.tightest,
    measured: Callable[[SizedModel, Workload], SizedModel] | None = None,
) -> ResolvedTarget:
    """Return a model with its workload: under its final runtime, over its ranks.

    With images the model is put under a runtime that takes them, unless it ``keeps_runtime``.
    ``deciding`` chooses the rank whose figures count, ``measured`` may put measurements in place
    of figures.

    Raises:
        InputError: when the model's processor refuses an image, the model takes none, or a split
            is not of its layers.
        UnsupportedError: when the runtime takes no images, the processor is not described, or
            mlx-lm does not run the model over such ranks.
    """
    if requested.has_images and not keeps_runtime:
        sized = with_runtime(sized, runtime_for_images(sized.runtime_model.runtime))
    if requested.has_own_context:
        requested = requested.of_context(_own_context(sized, requested))
    require_images(sized, requested.under(None))
    workload = requested.under(sized.runtime_model.runtime)
    require_cached(sized, workload)
    if workload.images:
        # The rules of all image processors, which other prompts need not.
        from memfit.estimators.images.processor import with_image_tokens

        workload = with_image_tokens(sized.checkpoint, workload)
    program = sized.runtime_model.facet(ProgramContext)
    if program and requested.prefill_step is None:
        workload = program.program_workload(workload)
    sized = settled_for(sized, workload)
    if measured and not workload.cached_tokens:
        sized = measured(sized, workload)
    shared = ranked(sized, ranks)
    part = deciding(shared, workload)
    return ResolvedTarget(part, workload, part.device, shared)


def _own_context(sized: SizedModel, requested: WorkloadQuestion) -> int:
    """Return the context of each sequence that follows from the model.

    Raises:
        InputError: when the model has no longest context.
    """
    most = sized.model.max_context
    if most is None:
        raise InputError(
            f"{setting('context')} {requested.context}: {sized.checkpoint.config_name} names no"
            " longest context; give a number of tokens"
        )
    program = sized.runtime_model.facet(ProgramContext)
    if program is None:
        return most
    workload = requested.of_context(most).under(sized.runtime_model.runtime)
    return program.program_context(workload, fitted=requested.context == "auto")
