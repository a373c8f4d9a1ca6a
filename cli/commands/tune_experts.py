"""``memfit tune experts``: run a mixture of experts with a part of its experts in memory."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memfit.cli.exits import Exit
from memfit.cli.measuring import measuring
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import RuntimeOptions
from memfit.cli.options.run import RunOptions, tokens_to_compare
from memfit.cli.prompts import prompt_list
from memfit.cli.render.output import require_writable
from memfit.estimators.base.units import parse_counts

if TYPE_CHECKING:
    from memfit.probes.experts.request import ExpertsRequest


class ExpertOptions(OptionGroup, frozen=True, kw_only=True):
    """What is measured."""

    prompts: str = option(
        metavar="FILE|TEXT",
        help="Prompts to count the routing of: a file with one on a line.",
        default=...,
    )
    held_out: str | None = option(metavar="FILE|TEXT", help="Other prompts, to measure with.")
    capacity: tuple[int, ...] | None = option(
        metavar="N,N...", help="Experts to keep in each layer, such as 16,32.", read=parse_counts
    )
    policy: Literal["load", "skip", "swap", "fail"] = option(
        help="A missing expert is read from the disk, left out, left out and read between tokens as"
        " in mlx-moe, or an error.",
        default="load",
    )
    max_tokens: int = option(help="Tokens to generate.", default=32, read=tokens_to_compare)
    prefill_step: int = option(min=1, help="Tokens in a prefill chunk.", default=2048)
    slowdown: int = option(
        metavar="PERCENT", min=0, max=100, help="The most that pays.", default=20
    )
    agreement: int = option(
        metavar="PERCENT", min=0, max=100, help="The least of equal tokens.", default=95
    )
    save_profile: Path | None = option(
        metavar="FILE", help="Write the counts, for memfit plan experts --profile."
    )
    record: Path | None = option(
        metavar="FILE",
        help="Write what the routers choose for each token, for memfit plan experts --routing.",
    )
    prepack: Path | None = option(
        metavar="DIR", help="Write the chosen experts, or load those written before."
    )
    plot: bool = option("--plot", help="Draw memory and speed by experts.", default=False)


@grouped
def tune_experts(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's directory, or org/name on the Hub.")
    ],
    experts: ExpertOptions,
    run: Annotated[RunOptions, Only("force", "memory_limit", "timeout", "download", "wired")],
    runtime: Annotated[RuntimeOptions, Only("margin")],
    output: PlanOutput,
) -> None:
    """Run a model with a part of its experts in memory.

    Shows memory, speed and agreement for numbers of experts, and whether fewer pay.
    """
    from memfit.probes.experiments.experts import tune_experts as answer
    from memfit.probes.process import ModelProcess
    from memfit.probes.store import user_store

    request_of = _request(experts, run, runtime, output)
    with measuring(model, run, verbose=output.verbose) as (checkpoint, path, progress):
        result = answer(
            request_of(checkpoint=checkpoint, path=path),
            start=run.start(ModelProcess, path),
            store=user_store(),
            progress=progress,
        )
    output.write(result, units=output.units, plot=experts.plot)
    raise typer.Exit(Exit.NO if result.answer.pays is False else Exit.YES)


def _request(
    experts: ExpertOptions, run: RunOptions, runtime: RuntimeOptions, output: PlanOutput
) -> "partial[ExpertsRequest]":
    """Return `ExpertsRequest` with the options; all are checked before anything is loaded."""
    from memfit.probes.experts.request import ExpertsRequest

    request_of = partial(
        ExpertsRequest,
        prompts=prompt_list("--prompts", experts.prompts),
        held_out=prompt_list("--held-out", experts.held_out) if experts.held_out else (),
        capacities=experts.capacity or (),
        policy=experts.policy,
        max_tokens=experts.max_tokens,
        prefill_step=experts.prefill_step,
        slowdown_percent=experts.slowdown,
        agreement_percent=experts.agreement,
        profile_file=experts.save_profile,
        pack=experts.prepack,
        record_file=experts.record,
        tries_wired=run.wired,
        **run.settings(runtime.margin, output.units),
    )
    for file in (output.file, experts.save_profile, experts.record):
        require_writable(file, needs_stdout=False)
    return request_of
