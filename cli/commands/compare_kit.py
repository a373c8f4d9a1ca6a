"""``memfit compare-kit``: what several machines measured, side by side."""

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.options.groups import OptionGroup, PlanOutput, grouped, option


class KitOptions(OptionGroup, frozen=True, kw_only=True):
    """Which checks are shown."""

    all_: bool = option(
        "--all", help="Show the checks too whose measurements are as estimated.", default=False
    )


@grouped
def compare_kit(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", show_default=False)],
    options: KitOptions,
    output: PlanOutput,
) -> None:
    """Compare what several machines measured with memfit tune --kit.

    Shows every check that is not as estimated on a machine, and the times.
    """
    from memfit.probes.kit.comparison import compare_kits, read_kit

    result = compare_kits([read_kit(file) for file in files])
    output.write(result, units=output.units, show_all=options.all_)
