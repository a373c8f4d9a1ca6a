"""An estimate as Markdown, for a pull request or a page."""

from collections.abc import Iterator

from memfit.cli.render import text as estimate_text
from memfit.cli.render.escape import escape_markdown
from memfit.cli.render.plot import drawn
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.estimate import Estimate, Plots

_PLOT_WIDTH = 80


def to_markdown(
    result: Estimate,
    units: Units,
    plots: Plots | None,
    explanation: tuple[str, ...],
) -> str:
    """Return the estimate as a Markdown section that ends with a line feed."""
    return "\n".join(_lines(result, units, plots, explanation)) + "\n"


def _lines(
    result: Estimate,
    units: Units,
    plots: Plots | None,
    explanation: tuple[str, ...],
) -> Iterator[str]:
    yield f"## {escape_markdown(result.model.id)}"
    yield ""
    yield f"**{estimate_text.verdict(result, units)}**"
    yield ""
    for line in estimate_text.summary(result, units):
        yield f"- {escape_markdown(line)}"
    yield ""
    yield "| Component | Size | Bytes | Basis |"
    yield "|---|---:|---:|---|"
    for name, nbytes, basis in estimate_text.rows(result):
        yield f"| {name} | {format_bytes(nbytes, units)} | {nbytes} | {basis} |"
    peak = result.peak_bytes
    yield f"| **Peak, in {result.peak_phase}** | {format_bytes(peak, units)} | {peak} | |"
    yield from _section("Recommended", result.recommendation.reasons)
    notes = (*result.assumptions, *(note.message for note in result.notes))
    yield from _section("Notes", notes)
    if plots:
        budget = result.device.working_set_bytes if result.device else None
        for plotted in drawn(plots, budget, units, _PLOT_WIDTH, ascii_only=False):
            yield from ("", "```text", *plotted, "```")
    yield from _section("Formulas", explanation)


def _section(heading: str, lines: tuple[str, ...]) -> Iterator[str]:
    if lines:
        yield from ("", f"### {heading}", "")
        yield from (f"- {escape_markdown(line)}" for line in lines)
