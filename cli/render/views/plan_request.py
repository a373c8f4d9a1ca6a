"""A plan of a request as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import Document, Table, Text, Verdict
from memfit.cli.render.view import view
from memfit.estimators.runtimes.zinc.requests import RequestPlan

_COLOURS = {"admitted": "green", "shortened": "yellow", "refused": "red"}


@view(RequestPlan)
def to_document(result: RequestPlan) -> Document:
    """Return the tokens of the request, and the answer of a server."""
    rows = [(name, str(tokens)) for name, tokens in _rows(result)]
    digits = max(len(tokens) for _, tokens in rows)
    lines = [f"{name:<20}{tokens:>{digits}} tokens" for name, tokens in rows]
    answer = f"{result.admission.capitalize()}: {result.reason}."
    return (
        Text(lines, only="terminal"),
        Table(("", "Tokens"), rows, only="page"),
        Verdict(answer, _COLOURS[result.admission], gap=False),
    )


def _rows(result: RequestPlan) -> Iterator[tuple[str, int]]:
    yield "Used", result.used_tokens
    yield "Requested", result.requested_tokens
    yield "Capacity", result.capacity_tokens
    yield "Remaining", result.remaining_tokens
    yield "Completion", result.budget.completion_tokens
    yield "Context target", result.budget.context_tokens
    if result.missing_tokens:
        yield "Missing for all", result.missing_tokens
