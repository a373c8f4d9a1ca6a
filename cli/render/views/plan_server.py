"""A plan of mlx_lm.server as a document."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from memfit.cli.render.chart import working_set
from memfit.cli.render.document import (
    VERDICT_COLOURS,
    Bar,
    BarChart,
    Commands,
    Document,
    Heading,
    Table,
    Text,
    Verdict,
    section,
)
from memfit.cli.render.view import view
from memfit.cli.render.views.assumed import marked
from memfit.cli.render.views.program_line import program_line
from memfit.cli.render.views.text import budget_of, runtime_text
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.results.server import ServerMix, ServerMoment, ServerPlan

_NO_DEVICE = "No device to compare with: --device m4-max-64 or --memory 32GB names one"


@view(ServerPlan)
def to_document(
    result: ServerPlan, units: Units, *, plot: bool = False, as_type: str | None = None
) -> Document:
    """Return the document; ``plot`` adds a chart of the bound and the mixes.

    Every line is marked where the type is assumed.
    """
    document = (
        Heading(result.model),
        Text(tuple(_facts(result, units)), style="dim", mark="-"),
        *program_line(result.program),
        Table(("At most", "Size"), tuple(_rows(result.bound, units)), align="lr", has_total=True),
        *([_mixes(result, units)] if result.mixes else ()),
        Verdict("; ".join(_verdict(result, units)), VERDICT_COLOURS[result.verdict]),
        Commands(result.commands, "Do this"),
        Text(tuple(_advice(result, units)), mark="-", gap=not result.commands),
        section("Notes", tuple(note.message for note in result.notes)),
        *([_chart(result, units)] if plot else ()),
    )
    return marked(document, as_type)


def _mixes(result: ServerPlan, units: Units) -> Table:
    rows = tuple(
        (mix.name, format_bytes(mix.needed_bytes, units), f"{_share(mix)} %")
        for mix in result.mixes
    )
    return Table(("Usual within these lengths", "Size", "Wait"), rows, align="lrr")


def _share(mix: ServerMix) -> int:
    """The percentage of its requests that wait for a place, rounded up."""
    return -(-100 * mix.waited // mix.requests)


def _facts(result: ServerPlan, units: Units) -> Iterator[str]:
    yield (
        f"{result.clients} requests open at a time; prompts of up to"
        f" {result.longest_prompt_tokens} tokens, {result.longest_generation_tokens} generated;"
        f" {runtime_text(result.runtime)}"
    )
    if result.images:
        yield f"{result.server}, each prompt with {result.images}: {result.images.tokens} tokens"
    if result.device:
        yield budget_of(result.device, units)
    yield f"{format_bytes(result.idle_bytes, units)} stay in memory when all requests have ended"
    if result.held_bytes and result.verdict in ("fits", "tight"):
        returnable = result.held_bytes - result.bound.needed_bytes
        yield (
            f"the process may hold {format_bytes(result.held_bytes, units)}:"
            f" {format_bytes(max(0, returnable), units)} are freed buffers, which MLX gives back"
        )


def _rows(moment: ServerMoment, units: Units) -> Iterator[tuple[str, str]]:
    prompts, decoding = moment.prefilled_prompts, moment.decoding_requests
    images = {"Images of other requests, cached features": moment.images_bytes}
    named = {
        "Weights": moment.weights_bytes,
        **(images if moment.images_bytes else {}),
        f"Caches: {decoding} decoding, {moment.stored_caches} stored": moment.cache_bytes,
        "Decoding" if moment.images_bytes else "Logits and log-probabilities": moment.logits_bytes,
        f"Prefill of {prompts} prompts": moment.prefill_bytes,
        "Margin": moment.margin_bytes,
        "Needs": moment.needed_bytes,
    }
    for name, nbytes in named.items():
        text = format_bytes(nbytes, units)
        if name == "Needs" and moment.prefill_error_bytes:
            text += f" (up to {format_bytes(nbytes + moment.prefill_error_bytes, units)})"
        yield name, text


def _chart(result: ServerPlan, units: Units) -> BarChart:
    """The bound and every mix, then both with the flags that fit."""
    budget = result.device.working_set_bytes if result.device else None
    bars = list(_bars(result.bound, result.mixes, budget))
    if result.fitting_bound:
        first, *others = _bars(result.fitting_bound, result.fitting_mixes, budget)
        bars += [replace(first, heading="With the flags that fit"), *others]
    limit = working_set(budget, units)
    kinds = ("weights", "caches, prefill and margin")
    return BarChart(title="What the server needs", kinds=kinds, bars=bars, units=units, limit=limit)


def _bars(bound: ServerMoment, mixes: Sequence[ServerMix], budget: int | None) -> Iterator[Bar]:
    needs = {"at most, in any order": bound.needed_bytes, **{m.name: m.needed_bytes for m in mixes}}
    for name, needed in needs.items():
        yield Bar(name, (bound.weights_bytes, needed - bound.weights_bytes), budget)


def _verdict(result: ServerPlan, units: Units) -> Iterator[str]:
    """The verdict by bytes, then what else may end a request."""
    yield _of_bytes(result, units)
    yield from (limit.reason for limit in result.limits if limit.verdict == "tight")


def _of_bytes(result: ServerPlan, units: Units) -> str:
    if not result.device:
        return _NO_DEVICE
    limit = format_limit(result.device.working_set_bytes, units)
    most = format_bytes(result.bound.needed_bytes, units)
    if result.usual is None:
        words = {"fits": "Fits", "tight": "Tight", "exceeds": "Does not fit"}
        return f"{words.get(result.verdict, result.verdict)}: at most {most} of {limit}"
    usual = format_bytes(result.usual.needed_bytes, units)
    kind = "recorded requests" if result.mixes[0].name == "recorded requests" else "usual mixes"
    if result.verdict == "fits":
        return f"Fits in any order: at most {most} of {limit}; {kind} take {usual}"
    if result.verdict == "exceeds":
        return f"Does not fit: {kind} take {usual} of {limit}, other orders up to {most}"
    if result.bound.needed_bytes > result.device.working_set_bytes:
        return f"Tight: {kind} fit with {usual} of {limit}, other orders take up to {most}"
    return f"Tight in any order: at most {most} of {limit}; {kind} take {usual}"


def _advice(result: ServerPlan, units: Units) -> Iterator[str]:
    if result.fitting and result.fitting_bound and result.commands:
        bound = format_bytes(result.fitting_bound.needed_bytes, units)
        fewer = ""
        if result.fitting_clients and result.fitting_clients < result.clients:
            fewer = f" from {result.fitting_clients} clients"
        yield f"With these flags no order of such requests{fewer} takes more than {bound}."
        yield from _price(result)
    # Flags change nothing about what ends one request, and are printed where their bytes fit.
    if result.verdict in ("exceeds", "tight") and not (result.fitting or result.commands):
        yield (
            "No flags of the server make every order fit: shorten prompts, quantise, or use more"
            " memory."
        )


def _price(result: ServerPlan) -> Iterator[str]:
    """What the proposed flags cost."""
    assert result.fitting
    kept, before = result.fitting.prompt_cache_size, result.settings.prompt_cache_size
    if result.fitting_mixes:
        waiting = max(map(_share, result.fitting_mixes))
        now = max(map(_share, result.mixes))
        if waiting > now:
            yield f"Up to {waiting} % of the requests wait for a place ({now} % with yours)."
    if kept == 0 < before:
        yield (
            "Without a prompt cache every turn of a conversation computes its whole prompt again."
        )
    elif kept < before:
        yield (
            f"{kept} of {before} caches are kept: a conversation that is no longer among them"
            " computes its prompt again."
        )
