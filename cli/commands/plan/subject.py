"""What several plans ask for: the model, opened and sized, and recorded requests."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.options.model import AdapterDirectory, AsType, NamedModel
from memfit.cli.options.runtime import VersionOptions
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.machine.device import Device
from memfit.estimators.sizing.workload import MARGIN_BYTES

if TYPE_CHECKING:
    from memfit.cli.render.document import Document
    from memfit.cli.render.view import Answer
    from memfit.estimators.results.result import Result
    from memfit.estimators.sizing.sized_model import Method, SizedModel


Traffic = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Recorded requests, CSV or JSONL with prompt_tokens and completion_tokens.",
    ),
]


class PlanModel(NamedModel, frozen=True, kw_only=True):
    """A model, and how it is converted."""

    def sized(
        self,
        machine: Device | None,
        *,
        verbose: bool,
        method: "Method" = "auto",
        margin_bytes: int = MARGIN_BYTES,
        versions: VersionOptions,
    ) -> "SizedModel":
        """Return the model on a machine under its native runtime of some versions.

        Raises:
            MemfitError: as `Catalog.sized`.
        """
        from memfit.estimators.sizing.catalog import Catalog

        quantization, reference = self.quantization(), self.reference()
        with reporting(verbose=verbose) as progress:
            catalog = Catalog(progress=progress, versioned=versions.versioned)
            catalog.checkpoint(reference)
        return catalog.sized(
            reference,
            quantize=quantization,
            device=machine,
            method=method,
            margin_bytes=margin_bytes,
            # Options of the subclasses.
            adapter=getattr(self, "adapter", None),
            as_type=getattr(self, "as_type", None),
        )

    def sized_for_mlx_lm(
        self,
        machine: Device | None,
        *,
        verbose: bool,
        versions: VersionOptions,
        method: "Method" = "auto",
        margin_bytes: int = 0,
    ) -> "SizedModel":
        """Return the model sized for mlx-lm on a machine, without a margin unless one is given.

        Raises:
            UnsupportedError: for a model that mlx-lm does not load, such as a GGUF file.
            DoesNotLoadError: for files that mlx-lm refuses to load.
        """
        sized = self.sized(
            machine, verbose=verbose, method=method, margin_bytes=margin_bytes, versions=versions
        )
        if not sized.runtime_model.is_mlx_lm:
            raise UnsupportedError(
                f"{sized.checkpoint.id}: this is planned for mlx-lm, and the model is sized for"
                f" {sized.runtime}"
            )
        return sized.loaded()


class AdaptedPlanModel(PlanModel, frozen=True, kw_only=True):
    """A model with the adapter that is loaded."""

    adapter: AdapterDirectory = None


class AssumablePlanModel(AdaptedPlanModel, frozen=True, kw_only=True):
    """A model of an architecture that may be assumed."""

    as_type: AsType = None

    def answer(self, result: "Result", document: "Document") -> "Answer":
        """Return a result with its document, every line marked where the type is assumed."""
        from memfit.cli.render.view import Answer
        from memfit.cli.render.views.assumed import marked

        return Answer(result, marked(document, self.as_type) if self.as_type else document)
