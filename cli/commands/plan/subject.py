"""The model a plan is about, opened and sized for mlx-lm."""

from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.progress import reporting
from memfit.estimators.arch.quantization import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.registry import MLX_LM

if TYPE_CHECKING:
    from memfit.estimators.sizing.sized_model import Sizing

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory, a .safetensors file, a config.json, a sample .yaml or org/name on the"
        " Hub.",
    ),
]


def sized(
    model: str, machine: Device | None, quantize: Quantization | None, *, verbose: bool
) -> "Sizing":
    """Return the sizing of a model on a machine.

    Raises:
        UnsupportedError: for a GGUF file.
    """
    from memfit.estimators.checkpoint.opening import open_checkpoint
    from memfit.estimators.sizing.sized_model import size

    with reporting(verbose=verbose) as sink:
        checkpoint = open_checkpoint(model, sink=sink)
    sizing = size(checkpoint, device=machine, quantize=quantize)
    if sizing.engine.runtime != MLX_LM:
        raise UnsupportedError(
            f"{checkpoint.id}: this is planned for checkpoints of mlx-lm, not for GGUF files"
        )
    return sizing
