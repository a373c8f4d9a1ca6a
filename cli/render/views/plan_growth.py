"""A plan of growing sessions as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import Bar, BarChart, Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.text import runtime_text
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.results.growth import GrowthPlan, GrowthRow

_HEADINGS = (
    *("Runtime", "Growth", "Step", "Per token", "Allocated", "Filled", "Copying"),
    *("Growths", "Copied", "Shared"),
)
_MOST_TURNS = 8  # shown; JSON has all
_NOTES = (
    "copying: the old and the new cache of the growing session are alive together, in all its"
    " layers; MLX frees the old cache of a layer before it grows the next, so it takes less",
    "copied: bytes copied into larger buffers until the end, for all sessions",
)


@view(GrowthPlan)
def to_document(result: GrowthPlan, units: Units, *, plot: bool = False) -> Document:
    """Return the document; ``plot`` adds a chart of each rule over the turns."""
    sessions = result.sessions
    many = "sessions" if sessions.sessions > 1 else "session"
    facts = [f"{sessions.sessions} {many} of {result.tokens} tokens"]
    if sessions.turns > 1 or sessions.prefix_tokens:
        facts.append(
            f"a prefix of {sessions.prefix_tokens} tokens, then {sessions.turns} turns of"
            f" {sessions.turn_tokens} tokens"
        )
    rows = tuple((*_row(rule, units), *_budget(result, rule, units)) for rule in result.rules)
    headings = (*_HEADINGS, "Budget") if result.has_budgets else _HEADINGS
    if result.runtimes:
        facts.append(", ".join(map(runtime_text, result.runtimes)))
    tables = [Table(headings, rows)]
    if sessions.turns > 1 and result.rules:
        tables.append(_turns(result, units))
    return report(
        title=f"{result.model}: how caches grow",
        facts=tuple(facts),
        tables=tuple(tables) if result.rules else (),
        verdict=_verdict(result, units),
        colour="red" if any(rule.crossing for rule in result.rules) else "green",
        sections=(
            ("Crossing the budget", tuple(_crossings(result, units))),
            ("Notes", tuple(_notes(result))),
        ),
        charts=(_plot(result, units),) if plot and result.rules else (),
    )


def _row(rule: GrowthRow, units: Units) -> tuple[str, ...]:
    return (
        ", ".join(rule.runtimes),
        rule.growth,
        str(rule.step),
        format_bytes(rule.bytes_per_token, units),
        format_bytes(rule.allocated_bytes, units),
        format_bytes(rule.held_bytes, units),
        format_bytes(rule.peak_bytes, units),
        str(rule.growths) if rule.growth != "paged" else "-",
        format_bytes(rule.copied_bytes, units) if rule.copied_bytes else "-",
        format_bytes(rule.shared_bytes, units) if rule.shared_bytes else "-",
    )


def _budget(result: GrowthPlan, rule: GrowthRow, units: Units) -> tuple[str, ...]:
    if not result.has_budgets or rule.budget_bytes is None:
        return ()
    return (format_limit(rule.budget_bytes, units),)


def _turns(result: GrowthPlan, units: Units) -> Table:
    shown = _picked(result.sessions.turns)
    headings = ("Allocated after turn", *(str(turn) for turn in shown))
    rows = tuple(
        (
            ", ".join(rule.runtimes),
            *(format_bytes(rule.turns[turn - 1].allocated_bytes, units) for turn in shown),
        )
        for rule in result.rules
    )
    return Table(headings, rows, "Allocated over the turns")


def _picked(turns: int) -> list[int]:
    """At most eight turns, evenly spread, with the last one."""
    if turns <= _MOST_TURNS:
        return list(range(1, turns + 1))
    return [turns * number // _MOST_TURNS for number in range(1, _MOST_TURNS + 1)]


def _crossings(result: GrowthPlan, units: Units) -> Iterator[str]:
    for rule in result.rules:
        if rule.crossing:
            at = rule.crossing
            where = f", in turn {at.turn}" if result.sessions.turns > 1 else ""
            yield (
                f"{', '.join(rule.runtimes)}: at token {at.tokens} of a session{where}:"
                f" {format_bytes(at.alive_bytes, units)} alive"
            )


def _notes(result: GrowthPlan) -> Iterator[str]:
    yield from (note.message for note in result.notes)
    if any(rule.copied_bytes for rule in result.rules):
        yield from _NOTES
    yield from (f"{one.runtime}: {one.reason}" for one in result.undecided)


def _verdict(result: GrowthPlan, units: Units) -> str:
    if result.budget_bytes is not None:
        budget = f"the budget of {format_limit(result.budget_bytes, units)}"
    elif result.has_budgets:
        budget = "the runtime's budget"
    else:
        return "No budget: give --budget, a device or a memory size."
    crossed = sum(rule.crossing is not None for rule in result.rules)
    if not crossed:
        return f"Within {budget} for caches under every rule."
    return f"Above {budget} for caches under {crossed} of {len(result.rules)} rules."


def _plot(result: GrowthPlan, units: Units) -> BarChart:
    """The turns under every rule, all to one scale."""
    budget = result.budget_bytes
    limit = "budget" if budget is None else f"budget {format_limit(budget, units)}"
    return BarChart(
        title="Caches over the turns",
        kinds=("filled", "allocated in addition", "old and new"),
        bars=[bar for rule in result.rules for bar in _bars(rule, result)],
        units=units,
        limit=limit if budget is not None or result.has_budgets else "",
    )


def _bars(rule: GrowthRow, result: GrowthPlan) -> Iterator[Bar]:
    heading = f"{', '.join(rule.runtimes)}, {rule.growth}"
    for number in _picked(result.sessions.turns):
        turn = rule.turns[number - 1]
        parts = (turn.held_bytes, max(0, turn.allocated_bytes - turn.held_bytes))
        label = f"turn {turn.turn}, {turn.tokens} tokens"
        yield Bar(label, parts, rule.budget_bytes, heading=heading)
        heading = ""
    yield Bar("peak while growing", (0, 0, rule.peak_bytes), rule.budget_bytes)
