"""``memfit card``: the peak of a model as data, for programs in any language."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from memfit.cli.commands.plan.subject import sized_for_mlx_lm
from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import AdaptedModel, MachineOptions, VersionOptions
from memfit.estimators.base.errors import InputError
from memfit.estimators.questions.target import RuntimeQuestion


class CardOptions(OptionGroup, frozen=True, kw_only=True):
    """What is made, checked or printed."""

    verify: Path | None = option(
        metavar="FILE", help="Check a card: its tables, and its vectors by the evaluator in Python."
    )
    evaluator: Literal["python", "javascript", "go", "rust", "swift"] | None = option(
        help="Print the evaluator in this language: one file without dependencies."
    )
    questions: int = option(
        help="Random questions that decide the pad of a card, and as many that check it.",
        default=2000,
        min=100,
        max=200_000,
    )


@grouped
def card(
    model: AdaptedModel,
    options: CardOptions,
    machine: MachineOptions,
    versions: VersionOptions,
    output: Annotated[PlanOutput, Only("format_", "json_", "file", "units", "verbose")],
) -> None:
    """Write the peak of a model as a table that any program can evaluate.

    The card has prompts of any length, with cached tokens and a reply, for one sequence with a
    16-bit cache under mlx-lm: memfit card MODEL --device m4-max-64 -o memory.json.
    """
    from memfit.cli.render.output import emit
    from memfit.estimators.guard.card import evaluator, read_card

    if bool(options.evaluator) + bool(options.verify) + (model.model is not None) > 1:
        raise InputError("MODEL, --verify and --evaluator: give one of them")
    if options.evaluator:
        emit(evaluator(options.evaluator), output.file)
        raise typer.Exit(Exit.YES)
    if options.verify:
        output.write(read_card(options.verify), units=output.units)
        raise typer.Exit(Exit.YES)
    from memfit.estimators.guard.tabulate import make_card

    device = machine.machine()
    if device is None:
        raise InputError("name the machine of the card: --device m4-max-64, or --memory 64GB")
    runtime = RuntimeQuestion(mlx_version=versions.mlx_version)
    sized = sized_for_mlx_lm(model, device, runtime, verbose=output.verbose)
    output.write(make_card(sized, questions=options.questions), units=output.units)
