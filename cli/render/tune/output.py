"""A tune result in the requested format."""

from typing import TYPE_CHECKING

from memfit.cli.options import CompareFormat
from memfit.estimators.base.units import Units

if TYPE_CHECKING:
    from memfit.probes.result import TuneResult


def written(
    result: "TuneResult", form: CompareFormat, units: Units, *, to_file: bool, plot: bool = False
) -> str:
    """Return the result as text that ends with a line feed; plots only in tables and Markdown."""
    if form is CompareFormat.JSON:
        from memfit.cli.render.data import to_json

        return to_json(result)
    if form is CompareFormat.CSV:
        from memfit.cli.render.tune.data import to_csv

        return to_csv(result)
    # rich takes longer to import than everything else, so only tables import it.
    from memfit.cli.render.document import to_markdown, to_terminal
    from memfit.cli.render.tune.layout import to_document

    document = to_document(result, units, plot=plot)
    return (
        to_markdown(document)
        if form is CompareFormat.MARKDOWN
        else to_terminal(document, to_file=to_file)
    )
