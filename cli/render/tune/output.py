"""A tuning in the form that was asked for."""

from typing import TYPE_CHECKING

from memfit.cli.options import CompareFormat
from memfit.estimators.base.units import Units

if TYPE_CHECKING:
    from memfit.probes.result import TuneResult


def written(
    result: "TuneResult", form: CompareFormat, units: Units, *, to_file: bool, plot: bool = False
) -> str:
    """Return the result as text that ends with a line feed; where people read it, with plots."""
    if form is CompareFormat.JSON:
        from memfit.cli.render.tune.data import to_json

        return to_json(result)
    if form is CompareFormat.CSV:
        from memfit.cli.render.tune.data import to_csv

        return to_csv(result)
    # Drawing takes rich, which takes longer to import than any of the rest.
    from memfit.cli.render.document import to_markdown, to_terminal
    from memfit.cli.render.tune.layout import laid_out

    document = laid_out(result, units, plot=plot)
    return (
        to_markdown(document)
        if form is CompareFormat.MARKDOWN
        else to_terminal(document, to_file=to_file)
    )
