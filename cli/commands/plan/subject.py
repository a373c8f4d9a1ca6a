"""What several plans ask for: the model, opened and sized, and recorded requests."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.options.model import NamedModel
from memfit.cli.options.runtime import VersionOptions
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.machine.device import Device
from memfit.estimators.sizing.workload import MARGIN_BYTES

if TYPE_CHECKING:
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
        )

    def sized_for_mlx_lm(
        self,
        machine: Device | None,
        *,
        verbose: bool,
        versions: VersionOptions,
        margin_bytes: int = 0,
    ) -> "SizedModel":
        """Return the model sized for mlx-lm on a machine, without a margin unless one is given.

        Raises:
            UnsupportedError: for a GGUF file.
        """
        sized = self.sized(machine, verbose=verbose, margin_bytes=margin_bytes, versions=versions)
        if not sized.runtime_model.is_mlx_lm:
            raise UnsupportedError(
                f"{sized.checkpoint.id}: this is planned for checkpoints of mlx-lm, not for GGUF"
                " files"
            )
        return sized
