"""A plan of a request, for the terminal and as Markdown."""

from collections.abc import Iterator

from memfit.cli.render.terminal import open_page
from memfit.estimators.runtimes.zinc.requests import RequestPlan

_COLOURS = {"admitted": "green", "shortened": "yellow", "refused": "red"}
_LEAST_WIDTH = 64


def to_table(result: RequestPlan, *, to_file: bool) -> str:
    """Return the plan as lines for the terminal."""
    page = open_page(to_file=to_file, least_width=_LEAST_WIDTH)
    rows = list(_rows(result))
    digits = max(len(str(tokens)) for _, tokens in rows)
    for name, tokens in rows:
        page.console.print(f"{name:<20}{tokens:>{digits}} tokens")
    page.console.print(_answer(result), style=f"bold {_COLOURS[result.admission]}")
    return page.text()


def to_markdown(result: RequestPlan) -> str:
    """Return the plan as a Markdown section that ends with a line feed."""
    lines = [f"**{_answer(result)}**", "", "| | Tokens |", "|---|---:|"]
    lines += (f"| {name} | {tokens} |" for name, tokens in _rows(result))
    return "\n".join(lines) + "\n"


def _rows(result: RequestPlan) -> Iterator[tuple[str, int]]:
    yield "Used", result.used_tokens
    yield "Requested", result.requested_tokens
    yield "Capacity", result.capacity_tokens
    yield "Remaining", result.remaining_tokens
    yield "Completion", result.budget.completion_tokens
    yield "Context target", result.budget.context_tokens
    if result.missing_tokens:
        yield "Missing for all", result.missing_tokens


def _answer(result: RequestPlan) -> str:
    return f"{result.admission.capitalize()}: {result.reason}."
