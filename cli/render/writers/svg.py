"""SVG: every chart of a document, below each other."""

from memfit.cli.render import svg
from memfit.cli.render.document import (
    BarChart,
    Chart,
    Document,
    HasDocument,
    Heading,
    HeatMap,
    RunChart,
    Scatter,
    Verdict,
)
from memfit.estimators.base.errors import InputError


def write(view: HasDocument, *, to_file: bool) -> str:
    """Return the charts as an SVG document.

    Raises:
        InputError: when there is none.
    """
    document = view.document()
    drawn = charts(document)
    if not drawn:
        raise InputError("this answer has no chart, so there is no SVG of it; use --format html")
    return svg.image(drawn, caption(document))


def caption(document: Document) -> str:
    """Return the verdict, else the title."""
    verdicts = [part.text for part in document if isinstance(part, Verdict)]
    titles = [part.text for part in document if isinstance(part, Heading)]
    return next(iter((*verdicts, *titles)), "memfit")


def charts(document: Document) -> list[Chart]:
    """Return the charts that a picture shows."""
    return [
        part
        for part in document
        if isinstance(part, BarChart | Scatter | RunChart | HeatMap)
        and part.only in ("", "picture")
    ]
