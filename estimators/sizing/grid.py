"""What needs how much where: settings by prompts, or by Macs when no device is known."""

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.machine.device import GIB
from memfit.estimators.results.advice import Action, Cell, Grid, GridRow, LeftOut
from memfit.estimators.results.terms import Method, Settings
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.sizing.joint import MAC_SIZES, JointSearch, Longest, RequestSettings
from memfit.estimators.sizing.run_limits import prompt_verdict, run_limits, tightened
from memfit.estimators.sizing.search import UNBOUNDED_CONTEXT, longest_prompt
from memfit.estimators.sizing.serving import Serving

PROMPTS = (4096, 16384, 65536, 131072)
"""Tokens of the columns, next to the prompt of the request and the model's own limit."""


NO_GRID = Grid("context_tokens", (), (), (LeftOut("grid", "not searched"),), "trace")
NO_MACS = Grid(
    "memory_bytes", (), (), (LeftOut("grid", "the runtime does not run on Macs"),), "formula"
)


def prompt_grid(search: JointSearch) -> Grid:
    """Return what the settings need for several prompts on the machine of the search."""
    prompts = prompts_of(search)

    def row(label: str, settings: RequestSettings) -> GridRow:
        cells = tuple(_cell(search, settings, tokens) for tokens in prompts)
        return _row(search, label, settings, cells, search.longest(settings))

    rows, left_out = _rows(search, row)
    stated = tuple(_stated(row, prompts, search) for row in rows)
    return Grid("context_tokens", prompts, stated, left_out, _method(search))


def _stated(row: GridRow, prompts: Sequence[int], search: JointSearch) -> GridRow:
    """The row with what else than bytes ends a run; rows are chosen by their bytes alone."""
    settings = _settings(search, row.settings)
    model = search.model(settings.weight_bits)

    def stated(cell: Cell, tokens: int) -> Cell:
        chosen = replace(settings, prefill_step=cell.prefill_step)
        limits = run_limits(model, search.workload_with(chosen, tokens))
        return replace(cell, verdict=tightened(cell.verdict, limits))

    cells = (
        stated(cell, tokens) if cell.verdict == "fits" else cell
        for cell, tokens in zip(row.cells, prompts, strict=True)
    )
    longest = prompt_verdict(model, search.workload_with(settings), row.context_tokens)
    return replace(row, cells=tuple(cells), context_verdict=longest)


def _settings(search: JointSearch, changes: Settings) -> RequestSettings:
    """The request's settings with the changes of a row; the prefill step is each cell's own."""
    requested = search.requested
    kv_bits = changes.get("kv_bits", requested.kv_bits)
    return RequestSettings(requested.prefill_step, kv_bits, changes.get("weight_bits"))


def with_server(grid: Grid, search: JointSearch, action: Action | None) -> Grid:
    """Return the grid with the server of an action below the row of its settings.

    Of several clients no prompt but the request's is judged: each takes dozens of figures.
    """
    if action is None or action.server is None or search.workload.batch > 1:
        return grid
    changes = {name: value for name, value in action.settings.items() if name != "prefill_step"}
    place = next((n for n, row in enumerate(grid.rows) if row.settings == changes), None)
    if place is None:
        return grid
    row, served, serving = grid.rows[place], action.server, Serving(search)
    settings = _settings(search, changes)
    cells = tuple(
        serving.cell(settings, tokens, cell)
        for tokens, cell in zip(grid.columns, row.cells, strict=True)
    )
    server = replace(
        row,
        label=f"{row.label}, server",
        program="server",
        cells=cells,
        context_tokens=served.context_tokens or 0,
        context_step=served.settings.prefill_step,
        context_verdict=prompt_verdict(search.sized, search.workload, served.context_tokens or 0),
    )
    rows = (*grid.rows[: place + 1], server, *grid.rows[place + 1 :])
    return replace(grid, rows=rows)


def with_traces(grid: Grid, search: JointSearch, longest: int) -> Grid:
    """Return a grid between traces with what is traced: the request, and the longest prompt."""
    if not grid.rows:
        return grid
    (first, *others), requested = grid.rows, search.requested
    column = grid.columns.index(search.workload.prompt_tokens)
    cells = list(first.cells)
    if cells[column].prefill_step == requested.prefill_step:
        traced = _cell_of(search.need(requested), search, requested)
        cells[column] = replace(traced, verdict=search.stated_verdict(requested))
    if longest > first.context_tokens:
        first = replace(
            first,
            context_tokens=longest,
            context_step=requested.prefill_step,
            context_verdict=prompt_verdict(search.sized, search.workload, longest),
        )
    return replace(grid, rows=(replace(first, cells=tuple(cells)), *others))


def mac_grid(search: JointSearch, ladder: Sequence[JointSearch]) -> Grid:
    """Return what the settings need for the request on each Mac."""

    def row(label: str, settings: RequestSettings) -> GridRow:
        cells = tuple(_cell(on_mac, settings, None) for on_mac in ladder)
        return _row(search, label, settings, cells, Longest(0, settings))

    rows, left_out = _rows(search, row)
    sizes = tuple(size * GIB for size in MAC_SIZES)
    return Grid("memory_bytes", sizes, rows, left_out, _method(search))


def _method(search: JointSearch) -> Method:
    """Between traces it is a trace that gives the figures, as far as it goes."""
    return (
        "trace"
        if isinstance(search.sized.runtime_model.source, Interpolated)
        else search.sized.runtime_model.source.method
    )


def prompts_of(search: JointSearch) -> tuple[int, ...]:
    """Return the prompt of the request, the usual ones within the model's limit, and the limit.

    One that is shown as the request is, in thousands of 1,024, would only repeat it.
    """
    requested, most = search.workload.prompt_tokens, longest_prompt(search.sized)
    others = {t for t in PROMPTS if search.workload.least_prompt_tokens <= t <= most}
    if most < UNBOUNDED_CONTEXT:
        others.add(most)
    unlike = {tokens for tokens in others if tokens < 1024 or tokens // 1024 != requested // 1024}
    return tuple(sorted({requested} | unlike))


def _rows(
    search: JointSearch, row: Callable[[str, RequestSettings], GridRow]
) -> tuple[tuple[GridRow, ...], tuple[LeftOut, ...]]:
    """The rows; where the first fits everywhere without a change, it is the only one."""
    rows: list[GridRow] = []
    left_out: list[LeftOut] = []
    for label, settings in _labelled(search):
        try:
            next_row = row(label, settings)
        except UnsupportedError as error:
            left_out.append(LeftOut(label, str(error)))
            continue
        if rows and all(cell.reason for cell in next_row.cells):
            left_out.append(LeftOut(label, next_row.cells[0].reason))
            continue
        rows.append(next_row)
        if len(rows) == 1 and _needs_no_change(rows[0], search):
            break
    return tuple(rows), tuple(left_out)


def _labelled(search: JointSearch) -> Iterator[tuple[str, RequestSettings]]:
    """The settings of each row: bits of the weights where they can be converted, else of KV."""
    requested = search.requested
    yield weights_label(search), requested
    if search.weight_bits:
        for bits in search.weight_bits:
            yield f"{bits} bits", RequestSettings(requested.prefill_step, requested.kv_bits, bits)
        return
    for kv_bits in search.kv_bits()[1:]:
        yield f"KV {kv_bits} bits", RequestSettings(requested.prefill_step, kv_bits)


def weights_label(search: JointSearch) -> str:
    """Return what the weights are where nothing is changed, or the bits of KV."""
    plan = search.sized.footprint.plan
    if plan and plan.converting:
        format_ = plan.default
        return f"{format_.bits} bits" if format_.mode == "affine" else format_.mode
    if search.weight_bits:
        return f"{dtypes.BITS[search.sized.model.dtype]} bits"
    return f"KV {search.requested.kv_bits} bits" if search.requested.kv_bits else "as it is"


def _needs_no_change(row: GridRow, search: JointSearch) -> bool:
    step = search.workload.prefill_step
    return all(cell.verdict == "fits" and cell.prefill_step == step for cell in row.cells)


def _row(
    search: JointSearch,
    label: str,
    settings: RequestSettings,
    cells: tuple[Cell, ...],
    longest: Longest,
) -> GridRow:
    return GridRow(
        label=label,
        settings=settings.changes(search.requested),
        weights_bytes=search.model(settings.weight_bits).resident_bytes,
        cells=cells,
        context_tokens=longest.tokens,
        context_step=longest.settings.prefill_step,
    )


def _cell(search: JointSearch, settings: RequestSettings, tokens: int | None) -> Cell:
    """The settings with the largest prefill step that fits, else as they are."""
    try:
        search.need(settings, tokens)
        chosen = search.with_best_step(settings, tokens)
        need = search.need(chosen, tokens)
    except (InputError, UnsupportedError) as error:
        return Cell("unknown", None, settings.prefill_step, str(error))
    return _cell_of(need, search, chosen)


def _cell_of(need: Need, search: JointSearch, settings: RequestSettings) -> Cell:
    verdict, _ = judge(need, search.sized.device)
    return Cell(verdict, need.peak_bytes, settings.prefill_step)
