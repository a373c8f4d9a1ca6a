"""What several plans have: the model, opened and sized, and recorded requests."""

from typing import TYPE_CHECKING

from memfit.cli.options.groups import option
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import parse_size
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.target import MARGIN_BYTES, ModelQuestion, RuntimeQuestion
from memfit.estimators.runtimes.facets import MlxLmPrograms
from memfit.estimators.sizing.sized_model import require_loaded

if TYPE_CHECKING:
    from memfit.estimators.sizing.sized_model import SizedModel


def disk_here(machine: Device | None) -> int | None:
    """Return the rate of this machine's disk that ``memfit tune disk`` saved, None elsewhere."""
    if machine is None or machine.source != "detected":
        return None
    from memfit.probes.experiments.disk import saved_disk

    return saved_disk()


CACHE_BUDGET = option(
    metavar="SIZE",
    help="Memory for them; by default 90 % of the working set minus the active peak.",
    read=parse_size,
)
TRAFFIC = option(
    metavar="FILE", help="Recorded requests, CSV or JSONL with prompt_tokens and completion_tokens."
)


def sized_model(
    model: ModelQuestion,
    machine: Device | None,
    runtime: RuntimeQuestion,
    *,
    verbose: bool,
    margin_bytes: int = MARGIN_BYTES,
) -> "SizedModel":
    """Return a model on a machine under its native runtime, of the versions that are given.

    Raises:
        MemfitError: as `Catalog.sized`.
    """
    from memfit.estimators.sizing.catalog import Catalog

    quantization, reference = model.quantization(), model.reference()
    with reporting(verbose=verbose) as progress:
        catalog = Catalog(progress=progress, versioned=runtime.versioned)
        catalog.checkpoint(reference)
    from memfit.estimators.sizing.resolved import TargetQuestion

    draft = model.drafting()
    question = TargetQuestion(
        reference=reference,
        quantize=quantization,
        device=machine,
        # What drafts is for the runtime that is named; all else is put under it later.
        runtime=runtime.chosen() if draft and runtime.runtime else None,
        method=runtime.method,
        margin_bytes=margin_bytes,
        adapter=model.adapter,
        as_type=model.as_type,
        draft=draft,
    )
    return catalog.sized_for(question)


def sized_for_mlx_lm(
    model: ModelQuestion,
    machine: Device | None,
    runtime: RuntimeQuestion,
    *,
    verbose: bool,
    margin_bytes: int = 0,
) -> "SizedModel":
    """Return a model sized for mlx-lm on a machine, without a margin unless one is given.

    Raises:
        UnsupportedError: for a model that mlx-lm does not load, such as a GGUF file.
        DoesNotLoadError: for files that mlx-lm refuses to load.
    """
    sized = sized_model(model, machine, runtime, verbose=verbose, margin_bytes=margin_bytes)
    if not sized.runtime_model.facet(MlxLmPrograms):
        raise UnsupportedError(
            f"{sized.checkpoint.id}: this is planned for mlx-lm, and the model is sized for"
            f" {sized.runtime}"
        )
    return require_loaded(sized)
