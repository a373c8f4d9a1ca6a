"""``memfit estimate``: the memory that a model needs, and whether it fits."""

from functools import partial
from typing import Literal

import typer
from msgspec.structs import replace

from memfit.cli.exits import exit_of_verdict
from memfit.cli.options.groups import FORMAT, TICKETS, OutputOptions, grouped, option
from memfit.cli.options.program_line import ProgramLine
from memfit.cli.options.questions import (
    EstimatedModel,
    EstimateRuntime,
    RankedMachine,
    WorkloadOptions,
)
from memfit.cli.progress import reporting
from memfit.cli.render.output import Format, emit, writer_of
from memfit.model import open_model


class EstimateReport(ProgramLine, frozen=True, kw_only=True):
    """What it answers for, and what is shown in addition to the figures."""

    panel = "Output options"
    explain: bool = option("--explain", help="Show every formula with its numbers.", default=False)
    breakdown: bool = option(
        "--breakdown", help="Show what the peak is made of, on a small screen too.", default=False
    )
    plot: bool = option(
        "--plot", help="Draw memory against context; with a trace also over a run.", default=False
    )
    tickets: Literal["yaml", "python", "swift"] | None = TICKETS


class EstimateOutput(OutputOptions, frozen=True, kw_only=True):
    """The output of an estimate, which can be YAML."""

    format_: Literal["table", "json", "yaml", "csv", "markdown", "html", "svg"] = FORMAT


@grouped
def estimate(
    model: EstimatedModel,
    workload: WorkloadOptions,
    machine: RankedMachine,
    runtime: EstimateRuntime,
    report: EstimateReport,
    output: EstimateOutput,
) -> None:
    """Estimate how much memory a model needs, and whether it fits.

    If it does not fit, the result recommends settings that do. Without MODEL a sample is
    estimated.
    """
    others = {"--explain": report.explain, "--breakdown": report.breakdown, "--plot": report.plot}
    output.require_tickets_alone(report.tickets, others)
    device, ranks = machine.first_machine(), machine.over()
    form: Format = "table" if report.tickets else output.form
    load = partial(_load_library, form)
    with reporting(verbose=output.verbose, while_waiting=load) as progress:
        opened = open_model(model, runtime, progress=progress)
        progress.begin("estimating", 0)
        plot = not report.tickets and output.draws(report.plot)
        result = opened.answer(workload, device, ranks, plot=plot, explain=report.explain)
        # The page of one machine has sliders; what ranks take is in its table.
        is_page = form == "html" and not ranks
        explored = opened.explored(workload, device) if is_page else None
    if report.tickets:
        from memfit.estimators.plans.wired.tickets import estimated_tickets

        emit(estimated_tickets(result).text(report.tickets), output.file)
        raise typer.Exit(exit_of_verdict(result.verdict, is_requested=result.device is not None))
    output.write(
        replace(result, program=report.shown),
        units=output.units,
        breakdown=report.breakdown,
        verbose=output.verbose,
        explored=explored,
    )
    raise typer.Exit(exit_of_verdict(result.verdict, is_requested=result.device is not None))


def _load_library(form: Format) -> None:
    """Import the modules needed next, while the Hub answers."""
    import memfit.cli.render.views.estimate
    import memfit.estimators.runtimes.mlx_lm
    import memfit.estimators.sizing.estimate
    import memfit.estimators.sizing.resolved  # noqa: F401

    writer_of(form)
