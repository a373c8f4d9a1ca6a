"""The models that fit a machine as a document, and as rows."""

import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from memfit.cli.render.chart import working_set
from memfit.cli.render.document import (
    VERDICT_CELLS,
    VERDICT_COLOURS,
    Bar,
    BarChart,
    Document,
    Table,
    Text,
    Toned,
    Verdict,
)
from memfit.cli.render.document import section as listed
from memfit.cli.render.view import view
from memfit.cli.render.views.text import (
    at_step,
    gigabytes,
    gpu_budget,
    runtime_text,
    tenths,
    tokens,
)
from memfit.estimators.base.units import Units
from memfit.estimators.machine.device import name_as_sold
from memfit.estimators.results.estimate import DecodeSpeed
from memfit.estimators.results.fits import Fit, Fits, NotSized
from memfit.estimators.sizing.search import PREFILL_STEPS

_FIELDS = (
    "name",
    "store",
    "reference",
    "parameters",
    "verdict",
    "weight_bits",
    "prefill_step",
    "peak_bytes",
    "needed_bytes",
    "context_tokens",
    "context_step",
    "most_tokens_per_second",
    "first_token_seconds",
    "smallest_memory_bytes",
    "reason",
)


@view(Fits)
class FitsView(NamedTuple):
    """The models that fit, those that do not, and those without figures."""

    result: Fits
    units: Units
    plot: bool = False
    brief: bool = False
    """One screen: what fits, and what to type next."""

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield a row for each model, those without figures last."""
        yield _FIELDS
        for row in self.result.models:
            speed = row.decode_speed.most_tokens_per_second if row.decode_speed else ""
            own = {**{name: getattr(row, name, "") for name in _FIELDS}, "reason": ""}
            first = row.first_token.seconds if row.first_token else ""
            own |= {"parameters": row.model.parameters, "most_tokens_per_second": speed}
            own["first_token_seconds"] = first
            yield tuple("" if own[name] is None else own[name] for name in _FIELDS)
        for each in self.result.not_sized:
            fields = {"name": each.name, "store": each.store, "reference": each.reference}
            yield tuple(({**fields, "reason": each.why.reason}).get(name, "") for name in _FIELDS)

    def document(self) -> Document:
        """Return the verdict, then a table of each kind, and what has no figures."""
        result = self.result
        fitting = [row for row in result.models if row.verdict != "exceeds"]
        others = [row for row in result.models if row.verdict == "exceeds"]
        return (
            Verdict(_verdict(result), "green" if fitting else "red", gap=False),
            Text(tuple(_facts(result, self.units)), style="dim"),
            *([_fitting(fitting, self.units)] if fitting else ()),
            *([_exceeding(others, result, self.units)] if others and not self.brief else ()),
            *([_next(fitting)] if self.brief else [listed("Notes", tuple(_warnings(result)))]),
            listed("Not sized", [_said(each, each.why.reason) for each in result.not_sized]),
            *([_chart(fitting, result, self.units)] if self.plot and fitting else ()),
        )


def _next(fitting: list[Fit]) -> Text:
    """What to type after the first list."""
    lines = (
        f"memfit {shlex.quote(_name(fitting[0]) if fitting else 'MODEL')}: what it needs, and how"
        " to run it",
        "memfit fits --for agents: with room for 32k tokens (also chat, images)",
        "memfit fits --all: all that fit; memfit --help: the other commands",
    )
    return listed("Next", lines)


def _verdict(result: Fits) -> str:
    generated = f" + {result.max_tokens} generated" if result.max_tokens else ", no reply"
    kind = " that take images" if result.without_images else ""
    kind += " that the adapter was trained on" if result.of_other_adapters else ""
    prompt = f"with a prompt of {result.prompt_tokens} tokens{generated}"
    if result.least_context > result.prompt_tokens:
        prompt += f", and have room for {tokens(result.least_context)}"
    every = len(result.models) + len(result.not_sized) + result.without_room
    count = f"{result.fitting} of {every} models"
    if result.left_out:
        count, prompt = (
            f"{result.fitting} models",
            f"{prompt}; {result.left_out} others not listed: --all",
        )
    return f"{name_as_sold(result.device.name)}: {count}{kind} fit {prompt}."


def _facts(result: Fits, units: Units) -> Iterator[str]:
    parts = [gpu_budget(result.device, units)]
    steps = {row.prefill_step for row in result.models}
    steps |= {row.context_step for row in result.models if row.context_tokens}
    if other := sorted(steps - {PREFILL_STEPS[0]}, reverse=True):
        parts.append(f"@{other[0]}: with that prefill step")
    parts += dict.fromkeys(runtime_text(row.runtime) for row in result.models)
    yield "; ".join(parts)
    if any(row.decode_speed for row in result.models):
        yield "tokens a second: expected; < the most that is possible, where runs were not measured"
    else:
        yield "no decode speed: the chip is not known; --device names one"


def _fitting(rows: list[Fit], units: Units) -> Table:
    unit = "GB" if units is Units.GB else "GiB"
    has_speed = any(row.decode_speed for row in rows)
    has_first = any(row.first_token for row in rows)
    speed = (*(("tokens/s",) if has_speed else ()), *(("first",) if has_first else ()))
    image = ("image",) if any(row.images for row in rows) else ()
    return Table(
        ("Fits", "weights", f"needs {unit}", "longest", *image, *speed, ""),
        [
            (
                _name(row),
                row.weights,
                tenths(row.needed_bytes, units) + at_step(row.prefill_step, PREFILL_STEPS[0]),
                _longest(row),
                *((_largest_image(row),) if image else ()),
                *((_speed(row.decode_speed),) if has_speed else ()),
                *((_first(row),) if has_first else ()),
                Toned(VERDICT_CELLS[row.verdict], VERDICT_COLOURS[row.verdict]),
            )
            for row in rows
        ],
        align="llrr" + "r" * len((*image, *speed)) + "l",
    )


def _chart(rows: list[Fit], result: Fits, units: Units) -> BarChart:
    budget = result.device.working_set_bytes
    return BarChart(
        title="Memory of the models that fit",
        kinds=("needs",),
        bars=[Bar(row.name, (row.needed_bytes,), budget, row.weights) for row in rows],
        units=units,
        limit=working_set(budget, units),
    )


def _exceeding(rows: list[Fit], result: Fits, units: Units) -> Table:
    unit = "GB" if units is Units.GB else "GiB"
    is_shorter = result.prompt_tokens < result.least_context
    prompt = f" for {tokens(result.prompt_tokens)} tokens" if is_shorter else ""
    return Table(
        ("Does not fit", f"smallest Mac{prompt}", "weights", f"needs {unit}"),
        [
            (
                _name(row),
                gigabytes(row.smallest_memory_bytes) if row.smallest_memory_bytes else "-",
                row.weights,
                tenths(row.needed_bytes, units) + at_step(row.prefill_step, PREFILL_STEPS[0]),
            )
            for row in rows
        ],
        align="lrlr",
    )


def _name(row: Fit) -> str:
    """What opens it; a repository of the index is found without its owner."""
    return row.name.rpartition("/")[2] if row.store == "index" else row.name


def _longest(row: Fit) -> str:
    if not row.context_tokens:
        return "-"
    mark = " !" if row.context_verdict == "tight" else ""
    return tokens(row.context_tokens) + at_step(row.context_step, PREFILL_STEPS[0]) + mark


def _largest_image(row: Fit) -> str:
    if row.images is None or row.images.largest is None:
        return "-"
    return "any" if row.images.any_size else str(row.images.largest)


def _first(row: Fit) -> str:
    """The time to the first token of the prompt."""
    return f"{row.first_token.seconds:.0f} s" if row.first_token else "-"


def _speed(speed: DecodeSpeed | None) -> str:
    if speed is None:
        return "-"
    if speed.expected_tokens_per_second:
        return f"{speed.expected_tokens_per_second[1]:.0f}"
    return f"<{speed.most_tokens_per_second:.0f}"


def _warnings(result: Fits) -> Iterator[str]:
    """Each warning once, with the models that it is of."""
    rows: dict[str, list[Fit]] = {}
    for row in result.models:
        for note in row.warnings:
            rows.setdefault(note.message, []).append(row)
    for message, (first, *others) in rows.items():
        if not others:
            yield _said(first, message)
            continue
        more = f" and {len(others)} others"
        yield f"{first.name}{more}: {message}"


def _said(row: Fit | NotSized, text: str) -> str:
    """A sentence on a model, by its name in place of its path."""
    short = text.replace(row.reference, row.name)
    return short if short.startswith(row.name) else f"{row.name}: {short}"
