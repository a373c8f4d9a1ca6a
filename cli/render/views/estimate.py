"""An estimate as a document, and as data."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from memfit.cli.render.document import (
    VERDICT_COLOURS,
    VERDICT_WORDS,
    BarChart,
    Chart,
    Commands,
    Document,
    Heading,
    HeatMap,
    RunChart,
    Sliders,
    Table,
    Text,
    Toned,
    Verdict,
    section,
)
from memfit.cli.render.view import view
from memfit.cli.render.views import estimate_text, text
from memfit.cli.render.views.assumed import marked
from memfit.cli.render.views.estimate_memories import memories_table, pool_table
from memfit.cli.render.views.estimate_text import settings_text
from memfit.cli.render.views.program_line import program_line
from memfit.cli.render.views.text import (
    at_step,
    gigabytes,
    image_lines,
    size,
    tenths,
    tokens,
)
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.machine.device import GIB
from memfit.estimators.results.advice import Action, Cell, Grid, GridRow
from memfit.estimators.results.estimate import Estimate, Note

if TYPE_CHECKING:
    from memfit.estimators.sizing.explore import Explored

_CELL = ("verdict", "needed_bytes", "prefill_step", "reason")


@view(Estimate)
class EstimateView(NamedTuple):
    result: Estimate
    units: Units
    breakdown: bool = False
    """Whether the components are shown where the screen has no room for them."""
    verbose: bool = False
    """Whether all recommendations and notes are shown."""
    explored: "Explored | None" = None
    """Points for a page on which settings are changed."""

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield a row for each cell of the grid, in bytes and tokens."""
        grid = self.result.grid
        yield ("settings", "weights_bytes", grid.axis, *_CELL, "longest_tokens")
        for row in grid.rows:
            for column, cell in zip(grid.columns, row.cells, strict=True):
                figures = (getattr(cell, name) for name in _CELL)
                yield (row.label, row.weights_bytes, column, *figures, row.context_tokens)

    def document(self) -> Document:
        """Return the verdict, the grid, what to type, and what the peak is made of."""
        result, units = self.result, self.units
        colour = VERDICT_COLOURS[result.verdict]
        facts = [estimate_text.task(result)]
        if not result.refusal:
            facts += [estimate_text.peak(result, units), *estimate_text.held(result, units)]
            facts += estimate_text.speed(result)
            facts += estimate_text.first_token(result)
        heading, commands, others = estimate_text.doing(result, units)
        # Why it does not load is said already.
        doubts = [] if result.refusal else [note.message for note in result.doubts]
        grid = tuple(_grid_table(result, units))
        images = image_lines(result, units)
        document = (
            Heading(result.model.id, only="page"),
            Verdict(estimate_text.headline(result, units), colour),
            Text(("; ".join(facts),), style="dim"),
            *program_line(result.program),
            Text(tuple(estimate_text.named_as(result)), style="dim"),
            Text(tuple(estimate_text.refusal(result)), mark="!"),
            Text(doubts, mark="!", only="terminal"),
            *_files(result, units),
            *grid,
            *self._heat_maps(grid, only="picture"),
            *self._recommended_row(),
            Text(estimate_text.legend(result, units), style="dim"),
            Text(tuple(self._recommended())),
            Commands(commands, heading),
            Text(tuple(estimate_text.conversion(result, units)), gap=not commands),
            # Longer prompts were not asked for: they give way to a doubt where the screen is full.
            Text(others, mark="-", gap=not commands, needs_room=bool(commands and doubts)),
            *([Text(images, "Images", mark="-", gap=True)] if images else ()),
            *self._ranks(),
            *_ways(result, units),
            *self._sliders(),
            *self._notes(),
            *self._details(),
            *self._charts(grid),
            *((Heading("Formulas", level=3, only="page"),) if result.explanation else ()),
            Text(result.explanation or (), mark="-", gap=True),
        )
        model = result.model
        return marked(document, model.model_type) if model.assumed_from else document

    def _ranks(self) -> Document:
        if not self.result.ranks:
            return ()
        from memfit.cli.render.views.ranks import rank_table

        return tuple(rank_table(self.result.ranks, self.units))

    def _recommended(self) -> Iterator[str]:
        best = self.result.best
        is_served = best and best.server and best.commands
        clients = self.result.workload.batch if is_served else 0
        if text := estimate_text.recommended(self.result.recommended, self.units, clients=clients):
            yield f"Recommended: {text}"

    def _ending(self) -> Iterator[Note]:
        """The warnings of which the verdict has the reason, and the commands the remedy."""
        if self.result.best:
            names = {limit.name.replace("_", "-") for limit in estimate_text.ending(self.result)}
            yield from (note for note in self.result.notes if note.code in names)

    def _notes(self) -> Iterator[Text]:
        """The warnings, with ``verbose`` and on a page everything that there is to know."""
        result = self.result
        said = {*result.doubts, *self._ending()}
        others = (note for note in result.notes if note not in said)
        warnings = tuple(note.message for note in others if note.level == "warning")
        everything = (*result.assumptions, *(note.message for note in result.notes))
        left_out = [f"{each.what} is left out: {each.reason}" for each in result.grid.left_out]
        if self.verbose:
            yield section("Settings", result.recommendation.reasons)
            yield section("Notes", (*everything, *left_out))
            return
        count = "a warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
        hidden = f"{count}: -v shows more"
        yield Text(warnings, mark="!", gap=True, only="terminal", needs_room=True, otherwise=hidden)
        yield section("Settings", result.recommendation.reasons, only="page")
        yield section("Notes", (*everything, *left_out), only="page")

    def _details(self) -> Iterator[Text | Table]:
        needs_room = not (self.breakdown or self.verbose)
        only: Literal["", "page"] = "page" if needs_room else ""
        yield Text((text.title(self.result.model),), style="dim", gap=True, only=only)
        yield from pool_table(self.result, self.units, needs_room=needs_room)
        yield _components(self.result, self.units, needs_room=needs_room)
        yield _bytes(self.result, self.units)
        yield from memories_table(self.result, self.units)
        yield from _process(self.result, self.units)

    def _heat_maps(
        self, grid: Sequence[Table], *, only: Literal["terminal", "picture"]
    ) -> Iterator[HeatMap]:
        """The grid in colours; a picture has it in place of the table."""
        for table in grid:
            note = "; ".join(estimate_text.legend(self.result, self.units))
            yield HeatMap(table=table, note=note, only=only)

    def _sliders(self) -> Iterator[Sliders | Text]:
        if self.result.refusal:
            return
        if self.explored and not self.explored.points:
            text = "Other settings cannot be tried here: each would be a trace of its own."
            yield Text((text,), only="picture")
        elif self.explored:
            from memfit.cli.render.views.explore import sliders

            budget = self.result.device.working_set_bytes if self.result.device else None
            yield sliders(self.explored, budget, self.units)

    def _recommended_row(self) -> Iterator[BarChart]:
        if self.explored:
            from memfit.cli.render.views.explore import recommended_row

            yield from recommended_row(self.result, self.units)

    def _charts(self, grid: Sequence[Table]) -> Iterator[Chart]:
        run, curve = self.result.run, self.result.curve
        if not (run or curve):
            return
        yield from self._heat_maps(grid, only="terminal")
        from memfit.cli.render.chart import curve_chart

        budget = self.result.device.working_set_bytes if self.result.device else None
        if run:
            yield RunChart(run=run, budget=budget, units=self.units)
        if curve:
            yield curve_chart(curve, budget, self.units, by=self.result.curve_method or None)


def _components(result: Estimate, units: Units, *, needs_room: bool) -> Table:
    """The components of the peak and the parts of the weights, drawn as bars."""
    budget = result.device.working_set_bytes if result.device else None
    return Table(
        ("Component", "Size", "", "Of budget" if budget else "Of peak", "Basis"),
        tuple(_rows(result, units, budget or max(result.peak_bytes, 1))),
        align="lrbrl",
        whole=max(budget or 0, result.peak_bytes, 1),
        only="terminal",
        needs_room=needs_room,
    )


def _rows(result: Estimate, units: Units, whole: int) -> Iterator[tuple[str | int, ...]]:
    """Name, size, bar, share and basis of each row; parts of a component have no bar."""
    for name, nbytes, basis in text.rows(result):
        share = text.percent(nbytes, whole)
        yield name, format_bytes(nbytes, units), nbytes, share, basis
        if name == "Weights":
            for part, part_bytes in text.weight_rows(result):
                yield f"  {part}", format_bytes(part_bytes, units), 0, "", ""
    peak = result.peak_bytes
    share = text.percent(peak, whole)
    yield f"Peak, in {result.peak_phase}", format_bytes(peak, units), peak, share, ""
    yield "Margin", format_bytes(result.components.margin.bytes, units), 0, "", ""


def _bytes(result: Estimate, units: Units) -> Table:
    """The components of the peak with their exact bytes."""
    peak = (f"Peak, in {result.peak_phase}", result.peak_bytes, "")
    rows = tuple(
        (name, format_bytes(nbytes, units), str(nbytes), basis)
        for name, nbytes, basis in (*text.rows(result), peak)
    )
    headings = ("Component", "Size", "Bytes", "Basis")
    return Table(headings, rows, align="lrrl", has_total=True, only="page")


def _process(result: Estimate, units: Units) -> Iterator[Table]:
    """Yield what the process holds, its seconds, and each limit that is not of its peak."""
    rows: list[tuple[str, str, str, str]] = [
        (estimate_text.LIMIT_NAMES[each.name], *estimate_text.limit(each, units), each.verdict)
        for each in result.limits
    ]
    if result.held_bytes and "held_memory" not in {each.name for each in result.limits}:
        rows.append(
            (estimate_text.LIMIT_NAMES["held_memory"], size(result.held_bytes, units), "", "")
        )
    rows += [(name, text, "", "") for name, text in estimate_text.seconds(result)]
    if rows:
        headings = ("What a run meets", "Here", "Passes up to", "Verdict")
        yield Table(headings, tuple(rows), align="lrrl", only="page")


def _grid_table(result: Estimate, units: Units) -> Iterator[Table]:
    """Yield the grid as a table; a narrow terminal drops the farthest columns first."""
    grid = result.grid
    if not grid.rows:
        return
    unit = "GB" if units is Units.GB else "GiB"
    places = range(2, 2 + len(grid.columns))
    if grid.axis == "memory_bytes":
        headings = ["", "needs", *(str(nbytes // GIB) for nbytes in grid.columns)]
        title, droppable = f"fits a Mac with {unit} of memory", list(places)[:0:-1]
    else:
        headings = ["", "weights", *map(tokens, grid.columns), "longest"]
        title = f"needs in {unit} for a prompt of"
        asked = result.workload.prompt_tokens
        droppable = [n for n in reversed(places) if grid.columns[n - 2] != asked]
    yield Table(
        headings,
        list(_grid_rows(grid, result.workload.prefill_step, units)),
        title,
        align="lr" + "l" * len(places) + "r",
        wrapped=(),
        droppable=droppable,
        only="text",
    )


def _grid_rows(grid: Grid, step: int, units: Units) -> Iterator[list[str | Toned]]:
    by_prompt = grid.axis == "context_tokens"
    cells = [[_cell(cell, by_prompt, step, units) for cell in row.cells] for row in grid.rows]
    for row, shown in zip(grid.rows, _padded(cells), strict=True):
        if by_prompt:
            longest = tokens(row.context_tokens) + at_step(row.context_step, step)
            longest += " !" if row.context_verdict == "tight" else ""
            is_server = row.program == "server"
            yield [
                "  server" if is_server else row.label,
                "" if is_server else size(row.weights_bytes, units),
                *shown,
                longest if row.context_tokens else "-",
            ]
        else:
            yield [row.label, _need(row, units), *shown]


def _need(row: GridRow, units: Units) -> str:
    needs = [cell.needed_bytes for cell in row.cells if cell.needed_bytes is not None]
    return size(max(needs), units) if needs else "-"


def _cell(cell: Cell, by_prompt: bool, step: int, units: Units) -> Toned:
    at = at_step(cell.prefill_step, step)
    if by_prompt and cell.needed_bytes is not None:
        # Without the size of the host there is no verdict.
        word = "" if cell.verdict == "unknown" else _CELL_WORDS[cell.verdict]
        text = f"{tenths(cell.needed_bytes, units)}{at} {word}".rstrip()
    elif by_prompt:
        text = _CELL_WORDS[cell.verdict]
    else:
        text = cell.verdict.replace("exceeds", "no") + at
    return Toned(text, VERDICT_COLOURS[cell.verdict])


def _padded(rows: Sequence[Sequence[Toned]]) -> list[list[Toned]]:
    """The cells with the decimal points of each column below each other."""
    points = [max(cell.text.find(".") for cell in column) for column in zip(*rows, strict=True)]
    return [
        [
            Toned(" " * max(0, point - cell.text.find(".")) + cell.text, cell.colour)
            if "." in cell.text
            else cell
            for cell, point in zip(row, points, strict=True)
        ]
        for row in rows
    ]


_WORDS = {"fits": "", "tight": "tight", "exceeds": "no", "unknown": "-"}
_CELL_WORDS = {**_WORDS, "tight": "!"}
"""In the grid, whose legend explains the mark: a word would cost a column of prompts."""


def _files(result: Estimate, units: Units) -> Iterator[Table]:
    """Yield the GGUF models of a repository, a row each."""
    rows = [
        (
            file.label,
            size(file.weights_bytes, units),
            size(file.needed_bytes, units) if file.needed_bytes else "-",
            Toned(_FILE_WORDS[file.verdict], VERDICT_COLOURS[file.verdict]),
            f"memfit {file.name}",
        )
        for file in result.files or ()
    ]
    if rows:
        headings = ("file", "size", "needs", "", "for its own figures")
        yield Table(headings, rows, align="lrrll", wrapped=(), droppable=(4,))


_FILE_WORDS = {**VERDICT_WORDS, "unknown": ""}


def _ways(result: Estimate, units: Units) -> Iterator[Table]:
    """Yield every action with its commands, for a page that has room for them."""
    rows = [
        (
            _change(action),
            _COSTS[action.cost],
            _needed(action, units),
            tokens(action.context_tokens) if action.context_tokens else "-",
            " && ".join(action.commands),
        )
        for action in result.actions
    ]
    if rows:
        headings = ("Change", "Costs", "Needs", "Longest prompt", "Commands")
        yield Table(headings, rows, "Every way", align="llrrl", only="picture")


def _needed(action: Action, units: Units) -> Toned:
    text = f"{size(action.needed_bytes, units)} {_WORDS[action.verdict]}".rstrip()
    if action.host_bytes:
        text += f", host {size(action.host_bytes, units)}"
    return Toned(text, VERDICT_COLOURS[action.verdict])


_COSTS = {"none": "nothing", "speed": "speed", "quality": "quality", "hardware": "a machine"}


def _change(action: Action) -> str:
    changes = [settings_text(action.settings)]
    if "memory_bytes" in action.settings:
        changes.insert(0, f"a Mac with {gigabytes(action.settings['memory_bytes'])}")
    return ", ".join(filter(None, changes)) or "none"
