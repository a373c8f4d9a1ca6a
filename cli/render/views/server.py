"""A plan of mlx_lm.server as a document."""

from collections.abc import Iterator

from memfit.cli.render.chart import needed_bar, working_set
from memfit.cli.render.document import (
    VERDICT_COLOURS,
    BarChart,
    Commands,
    Document,
    Heading,
    Table,
    Text,
    Verdict,
    section,
)
from memfit.cli.render.views.answer import runtime_text
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.server import ServerMoment, ServerPlan

_VERDICTS = {
    "fits": "Fits at the worst moment",
    "tight": "Tight at the worst moment",
    "exceeds": "Does not fit at the worst moment",
    "unknown": "No device to compare with: --device m4-max-64 or --memory 32GB names one",
}


def to_document(result: ServerPlan, units: Units, *, plot: bool) -> Document:
    """Return the document; ``plot`` adds a chart of the worst moments."""
    return (
        Heading(result.model),
        Text(tuple(_facts(result, units)), style="dim", mark="-"),
        Table(
            ("Worst moment", "Size"), tuple(_rows(result.worst, units)), align="lr", has_total=True
        ),
        Verdict(_verdict(result, units), VERDICT_COLOURS[result.verdict]),
        Commands(result.commands, "Do this"),
        Text(tuple(_advice(result, units)), mark="-", gap=not result.commands),
        section("Notes", tuple(note.message for note in result.notes)),
        *([_chart(result, units)] if plot else ()),
    )


def _facts(result: ServerPlan, units: Units) -> Iterator[str]:
    yield (
        f"{result.clients} requests open at a time; prompts of up to"
        f" {result.longest_prompt_tokens} tokens, {result.longest_generation_tokens} generated;"
        f" {runtime_text(result.runtime)}"
    )
    if result.images:
        yield f"{result.server}, each prompt with {result.images}: {result.images.tokens} tokens"
    if result.device:
        size = format_bytes(result.device.working_set_bytes, units)
        yield f"{result.device.name}, working set {size}"
    yield f"{format_bytes(result.idle_bytes, units)} stay in memory when all requests have ended"


def _rows(moment: ServerMoment, units: Units) -> Iterator[tuple[str, str]]:
    prompts, decoding = moment.prefilled_prompts, moment.decoding_requests
    images = {"Images of other requests, cached features": moment.images_bytes}
    named = {
        "Weights": moment.weights_bytes,
        **(images if moment.images_bytes else {}),
        f"Caches: {decoding} decoding, {moment.stored_caches} stored": moment.cache_bytes,
        "Decoding" if moment.images_bytes else "Logits and log-probabilities": moment.logits_bytes,
        f"Prefill of {prompts} prompt{'s' * (prompts != 1)}": moment.prefill_bytes,
        "Margin": moment.margin_bytes,
        "Peak": moment.peak_bytes,
    }
    for name, nbytes in named.items():
        text = format_bytes(nbytes, units)
        if name == "Peak" and moment.prefill_error_bytes:
            text += f" (up to {format_bytes(nbytes + moment.prefill_error_bytes, units)})"
        yield name, text


def _chart(result: ServerPlan, units: Units) -> BarChart:
    """The worst moment, and the one with the flags that fit."""
    budget = result.device.working_set_bytes if result.device else None
    moments = {"as it is": result.worst, "with the flags that fit": result.fitting_worst}
    bars = [
        needed_bar(name, (worst.weights_bytes, worst.cache_bytes), worst.peak_bytes, budget)
        for name, worst in moments.items()
        if worst
    ]
    limit = working_set(budget, units)
    kinds = ("weights", "caches", "prefill and margin")
    return BarChart(title="The worst moment", kinds=kinds, bars=bars, units=units, limit=limit)


def _verdict(result: ServerPlan, units: Units) -> str:
    text = _VERDICTS[result.verdict]
    if result.device:
        peak = format_bytes(result.worst.peak_bytes, units)
        text += f": {peak} of {format_bytes(result.device.working_set_bytes, units)}"
    if result.waited:
        share = -(-100 * result.waited // result.requests)
        text += f"; {share} % of {result.requests} requests wait for a place"
    return text


def _advice(result: ServerPlan, units: Units) -> Iterator[str]:
    if result.fitting_worst and result.commands:
        peak = format_bytes(result.fitting_worst.peak_bytes, units)
        yield f"With these flags it takes {peak} at the worst moment."
    if result.bound_bytes:
        bound = format_bytes(result.bound_bytes, units)
        yield (
            "The requests are equal, and end one after the other: no order of such requests takes"
            f" more than {bound}. --traffic has yours."
        )
    if result.verdict in ("exceeds", "tight") and not result.fitting:
        yield "No flags of the server make it fit: shorten prompts, quantise, or use more memory."
