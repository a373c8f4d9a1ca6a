"""The model a plan is about, opened and sized for mlx-lm."""

from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.progress import reporting
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.registry import MLX_LM

if TYPE_CHECKING:
    from memfit.estimators.sizing.sized_model import SizedModel

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory, a .safetensors file, a config.json, a sample .yaml or org/name on the"
        " Hub.",
    ),
]


def size_subject(
    model: str, machine: Device | None, quantize: Quantization | None, *, verbose: bool
) -> "SizedModel":
    """Return the sizing of a model on a machine.

    Raises:
        UnsupportedError: for a GGUF file.
    """
    from memfit.estimators.checkpoint.opening import open_checkpoint
    from memfit.estimators.sizing.sized_model import size

    with reporting(verbose=verbose) as progress:
        checkpoint = open_checkpoint(model, progress=progress)
    sized = size(checkpoint, device=machine, quantize=quantize)
    if sized.engine.runtime != MLX_LM:
        raise UnsupportedError(
            f"{checkpoint.id}: this is planned for checkpoints of mlx-lm, not for GGUF files"
        )
    return sized
