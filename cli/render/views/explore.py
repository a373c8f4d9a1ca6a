"""The points around an estimate as sliders."""

from memfit.cli.render.chart import NEEDED
from memfit.cli.render.document import VERDICT_WORDS, Slider, SliderPoint, Sliders
from memfit.cli.render.views.text import percent
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.sizing.explore import Explored, ExploredPoint

_LABELS = {
    "prompt_tokens": "Prompt",
    "batch": "Batch",
    "kv_bits": "KV cache",
    "prefill_step": "Prefill step",
}


def sliders(explored: Explored, budget: int | None, units: Units) -> Sliders:
    """Return a slider for each setting, and what every combination needs."""
    return Sliders(
        title=f"Try other settings, by {explored.method}",
        sliders=[
            Slider(
                _LABELS[name],
                [_value(name, value) for value in values],
                values.index(explored.requested[name]),
            )
            for name, values in explored.values.items()
        ],
        headings=NEEDED,
        points=[_point(each, explored.weights_bytes, budget, units) for each in explored.points],
        only="picture",
    )


def _value(name: str, value: int | None) -> str:
    if name == "prompt_tokens":
        return f"{value} tokens"
    if name == "kv_bits":
        return f"{value} bits" if value else "not quantised"
    if name == "batch":
        return f"{value} sequence{'' if value == 1 else 's'}"
    return f"{value} tokens"


def _point(point: ExploredPoint, weights: int, budget: int | None, units: Units) -> SliderPoint:
    if point.needed_bytes is None:
        return SliderPoint("unknown", f"Not possible: {point.reason}", 0, ("-", "-", "-"))
    parts = (weights, point.cache_bytes, point.needed_bytes - weights - point.cache_bytes)
    cells = tuple(format_bytes(nbytes, units) for nbytes in parts)
    needed = format_bytes(point.needed_bytes, units)
    if budget is None:
        return SliderPoint(point.verdict, f"Needs {needed}", 0, cells)
    share = percent(point.needed_bytes, budget)
    whole = format_limit(budget, units)
    sentence = f"{VERDICT_WORDS[point.verdict].capitalize()}: needs {needed} of {whole}, {share}"
    return SliderPoint(point.verdict, sentence, -(-100 * point.needed_bytes // budget), cells)
