"""A plan of growing sessions, laid out for the terminal and Markdown."""

from collections.abc import Iterator

from memfit.cli.render.plan.bars import Bar, bar_lines
from memfit.cli.render.plan.sheet import Grid, Plot, Sheet
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.growth import GrowthPlan, GrowthRow

_MOST_TURNS = 8  # shown; JSON has all
_NOTES = (
    "peak: old and new cache of the session that grows are alive together, in all its layers;"
    " MLX lets go of a layer's old cache as it gets to the next, so that its peak is lower",
    "copied: bytes moved into larger buffers until the end, for all sessions",
)


def to_sheet(result: GrowthPlan, units: Units, *, plot: bool) -> Sheet:
    """Return the sheet; ``plot`` adds bars of each rule over the turns."""
    asked = result.sessions
    many = "sessions" if asked.sessions > 1 else "session"
    facts = [f"{asked.sessions} {many} of {result.tokens} tokens"]
    if asked.turns > 1 or asked.prefix_tokens:
        facts.append(
            f"a prefix of {asked.prefix_tokens} tokens, then {asked.turns} turns of"
            f" {asked.turn_tokens} tokens"
        )
    grids = [Grid(_HEADINGS, tuple(_row(rule, units) for rule in result.rules))]
    if asked.turns > 1 and result.rules:
        grids.append(_turns(result, units))
    return Sheet(
        title=f"{result.model}: how caches grow",
        facts=tuple(facts),
        grids=tuple(grids) if result.rules else (),
        verdict=_verdict(result, units),
        colour="red" if any(rule.crossing for rule in result.rules) else "green",
        sections=(
            ("Crossing the budget", tuple(_crossings(result, units))),
            ("Notes", (*_NOTES, *(f"{one.runtime}: {one.reason}" for one in result.undecided))),
        ),
        plots=tuple(_plot(rule, result, units) for rule in result.rules) if plot else (),
    )


_HEADINGS = (
    "Runtime",
    "Growth",
    "Step",
    "A token",
    "Allocated",
    "Needed",
    "Peak",
    "Growths",
    "Copied",
    "Shared",
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


def _turns(result: GrowthPlan, units: Units) -> Grid:
    shown = _picked(result.sessions.turns)
    headings = ("Allocated after turn", *(str(turn) for turn in shown))
    rows = tuple(
        (
            ", ".join(rule.runtimes),
            *(format_bytes(rule.turns[turn - 1].allocated_bytes, units) for turn in shown),
        )
        for rule in result.rules
    )
    return Grid(headings, rows, "Allocated over the turns")


def _picked(turns: int) -> list[int]:
    """At most eight turns, evenly spread, the last among them."""
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


def _verdict(result: GrowthPlan, units: Units) -> str:
    if result.budget_bytes is None:
        return "No budget: --budget SIZE, a device or a memory size gives one."
    budget = format_bytes(result.budget_bytes, units)
    crossed = sum(rule.crossing is not None for rule in result.rules)
    if not crossed:
        return f"Within the budget of {budget} for caches under every rule."
    return f"Above the budget of {budget} for caches under {crossed} of {len(result.rules)} rules."


def _plot(rule: GrowthRow, result: GrowthPlan, units: Units) -> Plot:
    title = f"{', '.join(rule.runtimes)}, {rule.growth}"
    picked = [rule.turns[turn - 1] for turn in _picked(result.sessions.turns)]
    bars = [
        Bar(
            f"turn {turn.turn}, {turn.tokens} tokens",
            (turn.held_bytes, max(0, turn.allocated_bytes - turn.held_bytes)),
        )
        for turn in picked
    ]
    bars.append(Bar("peak while growing", (0, 0, rule.peak_bytes)))
    budget = result.budget_bytes
    limit = ("budget", budget) if budget is not None else None
    kinds = ("needed", "allocated besides", "old and new")

    def draw(width: int, ascii_only: bool) -> Iterator[str]:
        return bar_lines(title, kinds, bars, limit, units, width, ascii_only=ascii_only)

    return draw
