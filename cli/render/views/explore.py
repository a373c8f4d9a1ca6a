"""What only the page of an estimate has: the recommended row as bars, and sliders."""

from collections.abc import Iterator

from memfit.cli.render.chart import NEEDED
from memfit.cli.render.document import VERDICT_WORDS, Bar, BarChart, Slider, SliderPoint, Sliders
from memfit.cli.render.views.text import at_step, on_macos, percent, size, tokens
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.sizing.explore import Explored, ExploredPoint

_LABELS = {
    "weight_bits": "Weights",
    "prompt_tokens": "Prompt",
    "batch": "Batch",
    "kv_bits": "KV cache",
    "prefill_step": "Prefill step",
}


def recommended_row(result: Estimate, units: Units) -> Iterator[BarChart]:
    """Yield the row to take, each of its prompts as a bar whose full width is the limit."""
    grid, device = result.grid, result.device
    if device is None or grid.axis != "context_tokens" or not grid.rows:
        return
    changed = result.best.settings if result.best else {}
    wanted = {name: value for name, value in changed.items() if name != "prefill_step"}
    row = next((each for each in grid.rows if each.settings == wanted), grid.rows[0])
    budget, usual = device.working_set_bytes, result.workload.prefill_step
    bars = [
        Bar(
            f"{tokens(prompt)} tokens{at_step(cell.prefill_step, usual)}",
            (row.weights_bytes, cell.needed_bytes - row.weights_bytes),
            budget,
        )
        for prompt, cell in zip(grid.columns, row.cells, strict=True)
        if cell.needed_bytes is not None
    ]
    if bars:
        yield BarChart(
            title=f"{row.label}: a full bar is all that the GPU may use",
            kinds=("weights", "caches, workspace and margin"),
            bars=bars,
            units=units,
            limit=f"{size(budget, units, down=True)}{on_macos(device)}",
            to_limit=True,
            only="picture",
        )


def sliders(explored: Explored, budget: int | None, units: Units) -> Sliders:
    """Return a slider for each setting, and what every combination needs."""
    return Sliders(
        title=f"Try other settings, by {explored.method}",
        sliders=[
            Slider(
                _LABELS[name],
                [_value(name, value, explored.weights) for value in values],
                values.index(explored.requested[name]),
            )
            for name, values in explored.values.items()
        ],
        headings=NEEDED,
        points=[_point(each, budget, units) for each in explored.points],
        only="picture",
    )


def _value(name: str, value: int | None, weights: str) -> str:
    if name == "weight_bits":
        return f"{value} bits" if value else weights
    if name == "prompt_tokens":
        return f"{value} tokens"
    if name == "kv_bits":
        return f"{value} bits" if value else "not quantised"
    if name == "batch":
        return f"{value} sequences"
    return f"{value} tokens"


def _point(point: ExploredPoint, budget: int | None, units: Units) -> SliderPoint:
    if point.needed_bytes is None:
        return SliderPoint("unknown", f"Not possible: {point.reason}", 0, ("-", "-", "-"))
    parts = (
        point.weights_bytes,
        point.cache_bytes,
        point.needed_bytes - point.weights_bytes - point.cache_bytes,
    )
    cells = tuple(format_bytes(nbytes, units) for nbytes in parts)
    needed = format_bytes(point.needed_bytes, units)
    if budget is None:
        return SliderPoint(point.verdict, f"Needs {needed}", 0, cells)
    share = percent(point.needed_bytes, budget)
    whole = format_limit(budget, units)
    sentence = f"{VERDICT_WORDS[point.verdict].capitalize()}: needs {needed} of {whole}, {share}"
    return SliderPoint(point.verdict, sentence, -(-100 * point.needed_bytes // budget), cells)
