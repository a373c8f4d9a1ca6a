"""A plan in the requested format."""

from pathlib import Path
from typing import TYPE_CHECKING

from memfit.cli.options import PlanFormat
from memfit.cli.render.data import to_json
from memfit.cli.render.document import Document, to_markdown, to_terminal
from memfit.cli.render.output import emit

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def write_plan(
    result: "DataclassInstance", document: Document, form: PlanFormat, output: Path | None
) -> None:
    """Write a plan as JSON, or its document as Markdown or for the terminal.

    Raises:
        InputError: when the file cannot be written.
    """
    if form is PlanFormat.JSON:
        text = to_json(result)
    elif form is PlanFormat.MARKDOWN:
        text = to_markdown(document)
    else:
        text = to_terminal(document, to_file=output is not None)
    emit(text, output)
