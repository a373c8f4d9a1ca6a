"""Several machines for a model as a document."""

from collections.abc import Iterator, Sequence

from memfit.cli.render.document import (
    VERDICT_COLOURS,
    VERDICT_WORDS,
    Document,
    Table,
    Toned,
    report,
)
from memfit.cli.render.view import view
from memfit.cli.render.views.text import runtime_text, tenths, tokens
from memfit.estimators.base.units import Units
from memfit.estimators.machine.device import name_as_sold
from memfit.estimators.results.ranks import RankChoice, RanksPlan

_MOST_COMMANDS = 2


@view(RanksPlan)
def to_document(result: RanksPlan, units: Units) -> Document:
    """Return a row for each number of machines, and the commands of the fewest that fit."""
    named = result.choices[-1].on
    name = " + ".join(named) if named else name_as_sold(result.device.name)
    tokens_text = f"{result.workload.prompt_tokens} tokens"
    headings = ("Machines", "Shared", "Weights", "Needs", "", "Longest prompt")
    rows = tuple(_row(choice, units) for choice in result.choices)
    least = result.least_machines
    found = [c for c in result.choices if c.machines == least and c.verdict in ("fits", "tight")]
    verdict = f"{_fewest(found, name)} {'are' if (least or 1) > 1 else 'is'} enough"
    return report(
        title=result.model.id,
        facts=(f"{name}, {tokens_text}, {runtime_text(result.runtime)}",),
        tables=(Table(headings, rows, f"on each machine, in {units.symbol}", align="rlrrlr"),),
        verdict=f"{verdict} for {tokens_text}.",
        colour=VERDICT_COLOURS["fits" if least else "exceeds"],
        sections=(
            ("Second machine", tuple(_second(result))),
            ("Not possible", tuple(_impossible(result))),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
        commands=[command for choice in found[:_MOST_COMMANDS] for command in choice.commands],
    )


def _fewest(found: Sequence[RankChoice], name: str) -> str:
    """The machines that are enough, where some are."""
    if not found:
        return f"No number of {name} that was looked at"
    least = found[0]
    return " + ".join(least.on) if least.on else f"{least.machines} x {name}"


def _row(choice: RankChoice, units: Units) -> tuple[str | Toned, ...]:
    return (
        " + ".join(choice.on) or str(choice.machines),
        choice.parallel or "-",
        tenths(choice.weights_bytes, units),
        tenths(choice.needed_bytes, units),
        Toned(VERDICT_WORDS[choice.verdict], VERDICT_COLOURS[choice.verdict]),
        tokens(choice.longest_context) if choice.longest_context else "-",
    )


def _second(result: RanksPlan) -> Iterator[str]:
    gained = result.second_adds_tokens
    if gained is None:
        return
    alone = [choice for choice in result.choices if choice.machines == 1]
    one = max(alone, key=lambda choice: choice.longest_context or 0)
    both = [each for each in result.choices if each.machines == 2]
    if all(each.verdict == "exceeds" for each in (one, *both)):
        yield "two are not enough either"
    elif one.verdict == "exceeds" and gained > 0:
        yield f"it makes the model fit, with prompts up to {tokens(gained)}"
    elif gained > 0:
        yield f"it makes prompts {tokens(gained)} longer"
    else:
        yield "it allows no longer prompt"


def _impossible(result: RanksPlan) -> Iterator[str]:
    """The reasons, each with the numbers of machines that have it."""
    reasons: dict[str, list[str]] = {}
    for each in result.impossible:
        reasons.setdefault(each.reason, []).append(f"{each.machines} {each.parallel}")
    for reason, where in reasons.items():
        yield f"{', '.join(where)}: {reason}"
