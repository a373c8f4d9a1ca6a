"""Options of a model: the conversion to size it with."""

from typing import Annotated

import typer

from memfit.cli.options.groups import OptionGroup
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.quantization import Quantization, converted


class ModelOptions(OptionGroup, frozen=True, kw_only=True):
    """How models are converted before they are sized."""

    panel = "Model options"
    quantize: Annotated[
        int | None,
        typer.Option(metavar="BITS", help="Size the model as mlx_lm.convert would quantise it."),
    ] = None
    group_size: Annotated[int | None, typer.Option(help="Group size for --quantize.")] = None
    quant_mode: Annotated[
        str | None, typer.Option(help="Mode for --quantize: affine, mxfp4, nvfp4 or mxfp8.")
    ] = None

    def quantization(self) -> Quantization | None:
        """Return the conversion of --quantize, None when it was not given.

        Raises:
            InputError: for a format MLX does not have, or a group size or mode without bits.
        """
        if self.quantize is None:
            if self.group_size is not None or self.quant_mode is not None:
                raise InputError("--group-size and --quant-mode need --quantize BITS")
            return None
        return converted(self.quantize, self.group_size, self.quant_mode or "affine")
