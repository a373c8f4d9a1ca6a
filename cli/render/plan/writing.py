"""A plan in the form that was asked for."""

from typing import TYPE_CHECKING

from memfit.cli.options import PlanFormat
from memfit.cli.render.plan.data import to_json
from memfit.cli.render.plan.sheet import Sheet, to_markdown, to_table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def written(result: "DataclassInstance", sheet: Sheet, form: PlanFormat, *, to_file: bool) -> str:
    """Return the result as JSON, or its sheet as Markdown or for the terminal."""
    if form is PlanFormat.JSON:
        return to_json(result)
    if form is PlanFormat.MARKDOWN:
        return to_markdown(sheet)
    return to_table(sheet, to_file=to_file)
