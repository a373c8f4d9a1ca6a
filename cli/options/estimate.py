"""Options of an estimate, and of the library: the model with what is loaded, and the runtime."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memfit.cli.options.model import ModelOptions
from memfit.cli.options.runtime import ServedRuntime
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.quantization import converted
from memfit.estimators.sizing.workload import DRAFT_TOKENS

if TYPE_CHECKING:
    from memfit.estimators.sizing.catalog import Draft


class EstimatedModel(ModelOptions, frozen=True, kw_only=True):
    """The model, and what is loaded with it."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A directory, a .safetensors or .gguf file, a config.json, a sample .yaml, or"
            " org/name on the Hub. Default: a built-in sample.",
            show_default=False,
        ),
    ] = None
    adapter: Annotated[
        Path | None, typer.Option(help="Include the LoRA adapter in this directory.")
    ] = None
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Include this draft model.")
    ] = None
    draft_quantize: Annotated[
        int | None,
        typer.Option(metavar="BITS", help="Size the draft model as mlx_lm.convert quantises it."),
    ] = None
    num_draft_tokens: Annotated[
        int, typer.Option(min=1, max=64, help="Tokens that the draft model proposes in a step.")
    ] = DRAFT_TOKENS

    mmproj: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Include this vision projector of a GGUF model."),
    ] = None

    def drafting(self) -> "Draft | None":
        """Return the draft model of --draft with its settings.

        Raises:
            InputError: for bits that MLX does not have, or bits without a draft model.
        """
        from memfit.estimators.sizing.catalog import Draft

        if self.draft is None:
            if self.draft_quantize is not None:
                raise InputError("--draft-quantize needs --draft MODEL")
            return None
        bits = self.draft_quantize
        return Draft(self.draft, converted(bits) if bits else None, self.num_draft_tokens)


class EstimateRuntime(ServedRuntime, frozen=True, kw_only=True):
    """The runtime, and how its figures are computed."""

    method: Annotated[
        Literal["auto", "formula", "trace"], typer.Option(help="How to compute the figures.")
    ] = "auto"
