"""The model of a plan, opened and sized."""

from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.progress import reporting
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.machine.device import Device
from memfit.estimators.sizing.workload import MARGIN_BYTES

if TYPE_CHECKING:
    from memfit.estimators.sizing.sized_model import Method, SizedModel

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory, a .safetensors file, a config.json, a sample .yaml, or org/name on the"
        " Hub.",
    ),
]


def size_subject(
    model: str, machine: Device | None, quantize: Quantization | None, *, verbose: bool
) -> "SizedModel":
    """Return a model sized for mlx-lm on a machine.

    Raises:
        UnsupportedError: for a GGUF file.
    """
    # These plans state what a model takes, without a margin.
    sized = open_sized(model, machine, quantize, verbose=verbose, margin_bytes=0)
    if not sized.runtime_model.is_mlx_lm:
        raise UnsupportedError(
            f"{sized.checkpoint.id}: this is planned for checkpoints of mlx-lm, not for GGUF files"
        )
    return sized


def open_sized(
    model: str,
    machine: Device | None,
    quantize: Quantization | None,
    *,
    verbose: bool,
    method: "Method" = "auto",
    margin_bytes: int = MARGIN_BYTES,
) -> "SizedModel":
    """Return a model on a machine under its native runtime.

    Raises:
        MemfitError: as `Catalog.sized`.
    """
    from memfit.estimators.sizing.catalog import Catalog

    with reporting(verbose=verbose) as progress:
        catalog = Catalog(progress=progress)
        catalog.checkpoint(model)
    return catalog.sized(
        model, quantize=quantize, device=machine, method=method, margin_bytes=margin_bytes
    )
