"""``memfit diff``: what another version of mlx-lm or mlx-vlm changes for a model's memory."""

from typing import Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.options.completion import complete_device
from memfit.cli.options.groups import OptionGroup, PlanOutput, grouped, option
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_counts

USUAL = (
    *("llama-3.2-3b", "qwen3-4b-4bit", "qwen3-30b-a3b-4bit", "gemma-3-4b", "gpt-oss-20b"),
    *("qwen3.5-35b-a3b", "deepseek-v2-lite"),
)
"""Samples of the classes that most published models have."""


class DiffOptions(OptionGroup, frozen=True, kw_only=True):
    """What is traced."""

    context: tuple[int, ...] | None = option(
        metavar="A,B", help="Tokens of the prompts. Default: 4k,32k,128k.", read=parse_counts
    )
    image: str | None = option(
        metavar="WxH", help="An image in each prompt, such as 1024x768, with --mlx-vlm."
    )
    device: str = option(
        help="The machine whose kernels are traced.",
        default="m4-max-64",
        autocompletion=complete_device,
    )


@grouped
def diff(
    options: DiffOptions,
    output: PlanOutput,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL...]", help="The models; default: seven samples."),
    ] = None,
    mlx_lm: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="OLD NEW", help="Versions, folders, or installed."),
    ] = None,
    mlx_vlm: Annotated[
        tuple[str, str] | None, typer.Option(metavar="OLD NEW", help="The same for mlx-vlm.")
    ] = None,
) -> None:
    """Show what another version of mlx-lm or mlx-vlm changes, in bytes.

    Both versions are downloaded, and their classes traced with the MLX that is installed; no
    weights and no Mac are needed: memfit diff qwen3-8b-4bit --mlx-lm 0.31.1 installed
    """
    from memfit.library_diff import library_diff

    if (versions := mlx_lm or mlx_vlm) is None or (mlx_lm and mlx_vlm):
        raise InputError("give either --mlx-lm OLD NEW or --mlx-vlm OLD NEW")
    if options.image and mlx_lm:
        raise InputError("--image: mlx-vlm runs prompts with images; give --mlx-vlm OLD NEW")
    with reporting(verbose=output.verbose) as progress:
        result = library_diff(
            "mlx-lm" if mlx_lm else "mlx-vlm",
            versions,
            models or USUAL,
            options.context or (4096, 32768, 131072),
            options.device,
            image=options.image,
            progress=progress,
        )
    output.write(result, units=output.units)
    undecided = Exit.UNSUPPORTED if result.undecided() else Exit.YES
    raise typer.Exit(Exit.NO if result.grows() else undecided)
