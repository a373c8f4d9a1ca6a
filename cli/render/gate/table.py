"""A gate's report for the terminal; without colours in a pipe or a file."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.cli.render.gate import text as gate_text
from memfit.cli.render.terminal import open_page
from memfit.estimators.results.gate import GateReport, TargetReport

_LEAST_WIDTH = 80
_COLOURS = {
    "passed": "green",
    "broken": "red",
    "invalid": "red",
    "undecided": "yellow",
    "unreachable": "yellow",
}


def to_table(report: GateReport, *, to_file: bool) -> str:
    """Return the report as text; numbers are never cut."""
    page = open_page(to_file=to_file, least_width=_LEAST_WIDTH)
    for target in report.targets:
        _draw(page.console, target, ascii_only=page.ascii_only)
        page.console.print()
    page.console.print(
        Text(gate_text.headline(report), style=f"bold {_COLOURS[report.verdict]}"), soft_wrap=True
    )
    page.console.print(Text(gate_text.footer(report), style="dim"), soft_wrap=True)
    return page.text()


def _draw(console: Console, target: TargetReport, *, ascii_only: bool) -> None:
    status = Text(gate_text.status(target), style=_COLOURS[target.status])
    console.print(Text(target.name, style="bold") + ": " + status, soft_wrap=True)
    console.print(Text(gate_text.subject(target), style="dim"), soft_wrap=True)
    if target.message is not None:
        console.print(f"  {target.message}", soft_wrap=True)
    if target.checks:
        console.print(_checks(target, ascii_only=ascii_only))
    for check in target.checks:
        if not check.passed:
            console.print(f"  {gate_text.broken(check)}", soft_wrap=True)
            console.print(f"    {gate_text.remedy(check)}", soft_wrap=True)
    for note in target.notes:
        console.print(f"  note: {note.message}", soft_wrap=True)


def _checks(target: TargetReport, *, ascii_only: bool) -> Table:
    table = Table(box=box.ASCII if ascii_only else box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Limit", no_wrap=True)
    table.add_column("Figure", justify="right", no_wrap=True)
    table.add_column("Allowed", overflow="fold")
    table.add_column("", no_wrap=True)
    for check in target.checks:
        result = "ok" if check.passed else "BROKEN"
        table.add_row(
            gate_text.limit_name(check), gate_text.figure(check), gate_text.allowed(check), result
        )
    return table
