"""A plan of contexts, laid out for the terminal and Markdown."""

from collections.abc import Iterator
from functools import partial

from memfit.cli.render.chart import curve_chart
from memfit.cli.render.document import (
    VERDICT_COLOURS,
    VERDICT_WORDS,
    Document,
    HeatMap,
    Table,
    Toned,
    report,
)
from memfit.cli.render.view import view
from memfit.cli.render.views import text as estimate_text
from memfit.cli.render.views.assumed import marked
from memfit.cli.render.views.text import image_lines, memory
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.plans.context.plan import PERCENTILES
from memfit.estimators.results.advice import StepSchedule
from memfit.estimators.results.context import (
    ContextPlan,
    Distribution,
    MatrixCell,
    TrafficPlan,
)
from memfit.estimators.results.estimate import CurvePoint

_MARKS = {"fits": "", "tight": " tight", "exceeds": " no", "unknown": ""}


@view(ContextPlan)
def to_document(
    result: ContextPlan,
    units: Units,
    curve: tuple[CurvePoint, ...] = (),
    as_type: str | None = None,
) -> Document:
    """Return the document; with a curve it has a plot of memory against context.

    Every line is marked where the type is assumed.
    """
    tables = [_profile(result, units), _contexts(result, units)]
    matrix = [_matrix(result.matrix, units)] if result.matrix else []
    tables += matrix
    if result.traffic:
        tables.append(_traffic(result.traffic))
    budget = result.device.working_set_bytes if result.device else None
    document = report(
        title=f"{result.model.id}: contexts under {result.runtime.name}",
        facts=(estimate_text.task(result), estimate_text.machine(result, units)),
        tables=tuple(tables),
        verdict=_verdict(result, units),
        colour=VERDICT_COLOURS[result.verdict],
        sections=(
            ("Requests", tuple(_requests(result))),
            ("Images", image_lines(result, units)),
            ("Notes", tuple(_notes(result))),
        ),
        charts=(
            *(HeatMap(table=table, only="picture") for table in matrix if curve),
            *((curve_chart(curve, budget, units),) if curve else ()),
        ),
    )
    return marked(document, as_type)


def _profile(result: ContextPlan, units: Units) -> Table:
    memory, shown = result.profile, partial(format_bytes, units=units)
    return Table(
        ("Memory", "Device-local", "Host-visible"),
        (
            ("Weights", shown(result.weights_bytes), ""),
            (
                "Fixed",
                shown(memory.fixed_device_local_bytes),
                shown(memory.fixed_host_visible_bytes),
            ),
            ("  of it states", shown(memory.gpu_ssm_bytes), ""),
            (
                "A token",
                shown(memory.device_local_bytes_per_token),
                shown(memory.host_visible_bytes_per_token),
            ),
        ),
    )


def _contexts(result: ContextPlan, units: Units) -> Table:
    ceilings = result.ceilings
    rows = [
        ("Ceiling: the model's", "", _tokens(ceilings.model)),
        ("Ceiling: requested", "", _tokens(ceilings.requested)),
        ("Ceiling: the backend's", "", _tokens(ceilings.backend)),
    ]
    rows = [row for row in rows if row[2] != "-"]
    for name, largest in (
        ("Largest, device-local", result.device_local),
        ("Largest, unified", result.unified),
    ):
        if largest:
            budget = format_limit(largest.budget_bytes, units)
            rows.append((name, budget, _fitting(largest.tokens)))
    if (host := result.host) and host.needed_bytes and result.device_local:
        budget = format_limit(host.memory_bytes, units) if host.memory_bytes else "-"
        needed = format_bytes(host.needed_bytes, units)
        rows.append(("  host memory for it", budget, needed))
    if result.device:
        budget = format_limit(result.recommended_bytes or 0, units)
        mark = " !" if result.longest_verdict == "tight" else ""
        rows.append(("Recommended", budget, _fitting(result.longest_context or 0) + mark))
    if result.automatic:
        own = result.automatic
        budget = format_limit(own.budget_bytes, units)
        if own.tokens is not None:
            rows.append((f"{result.runtime.name}'s own choice", budget, _tokens(own.tokens)))
        rows.append(("Right by that budget", budget, _fitting(own.right_tokens)))
    return Table(("Context", "Budget", "Tokens"), tuple(rows or [("No device", "", "-")]))


def _matrix(cells: tuple[MatrixCell, ...], units: Units) -> Table:
    counts = sorted({cell.requests for cell in cells})
    lengths = sorted({cell.context_tokens for cell in cells})
    by_place = {(cell.context_tokens, cell.requests): cell for cell in cells}
    rows: list[tuple[str | Toned, ...]] = [
        (str(tokens), *(_cell(by_place[tokens, count], units) for count in counts))
        for tokens in lengths
    ]
    headings = ("Tokens each", *(f"{n} requests" for n in counts))
    return Table(headings, rows, "Memory by context and requests at once")


def _cell(cell: MatrixCell, units: Units) -> Toned:
    if cell.needed_bytes is None:
        return Toned("-", "default")
    text = format_bytes(cell.needed_bytes, units) + _MARKS[cell.verdict]
    return Toned(text, VERDICT_COLOURS[cell.verdict])


def _traffic(traffic: TrafficPlan) -> Table:
    headings = ("Traffic, tokens", "mean", *(f"{p} %" for p in PERCENTILES), "largest")
    rows = (
        ("prompt", *_texts(traffic.prompt)),
        ("completion", *_texts(traffic.completion)),
        ("both", *_texts(traffic.total)),
    )
    return Table(headings, rows, f"{traffic.requests} requests")


def _texts(found: Distribution) -> tuple[str, ...]:
    values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.largest)
    return tuple(map(str, values))


def _requests(result: ContextPlan) -> Iterator[str]:
    work = result.workload
    if result.largest_batch is not None:
        yield f"largest batch of {work.prompt_tokens} tokens each: {result.largest_batch}"
    if result.automatic and result.automatic.reason:
        yield result.automatic.reason
    if result.schedule:
        yield _schedule(result.schedule)
    traffic = result.traffic
    if traffic is None:
        return
    yield f"99 % of the requests are served by a context of {traffic.context_for_99} tokens"
    if traffic.fitting is not None:
        share = f"{100 * traffic.fitting // traffic.requests} %"
        yield (
            f"{traffic.fitting} of {traffic.requests} requests ({share}) are within"
            f" {traffic.longest_context or 0} tokens, the longest context that fits"
        )
        yield (
            f"at once: {traffic.at_once_for_99} requests as long as that,"
            f" {traffic.at_once_of_mean} of the mean length"
        )


def _schedule(schedule: StepSchedule) -> str:
    """The steps of a program of one's own: no command of mlx-lm takes more than one."""
    steps = ", ".join(f"{step} up to {tokens}" for tokens, step in schedule.steps)
    text = (
        f"a program of your own can lower the prefill step on the way: {steps} tokens, in place of"
        f" {schedule.context_with_first_step} with {schedule.steps[0][1]} alone;"
        f" {schedule.chunks} chunks in place of {schedule.chunks_with_last_step} with"
        f" {schedule.steps[-1][1]} alone"
    )
    if (schedule.seconds or 0) < (schedule.seconds_with_last_step or 0):
        text += f", {schedule.seconds:.0f} s in place of {schedule.seconds_with_last_step:.0f}"
    return text


def _verdict(result: ContextPlan, units: Units) -> str:
    tokens = result.workload.prompt_tokens
    if result.fit is None or result.device is None:
        return f"{tokens} tokens: name a device or a memory size for a verdict."
    fit, shown = result.fit, partial(format_bytes, units=units)
    headroom = (
        f"{format_limit(fit.headroom_bytes, units)} of headroom"
        if fit.headroom_bytes >= 0
        else f"{shown(-fit.headroom_bytes)} too much"
    )
    of = f"{memory(result.device, units)} of memory"
    if fit.recommended_bytes != fit.total_bytes:
        of = f"a working set of {format_limit(fit.recommended_bytes, units)} and {of}"
    verdict = f"{tokens} tokens: {VERDICT_WORDS[result.verdict]}"
    reasons = "".join(f"; {limit.reason}" for limit in result.limits if limit.verdict == "tight")
    return f"{verdict}: {shown(fit.required_bytes)} of {of}; {headroom}{reasons}."


def _tokens(value: int | None) -> str:
    return "-" if value is None else f"{value} tokens"


def _fitting(tokens: int) -> str:
    return f"{tokens} tokens" if tokens else "does not fit"


def _notes(result: ContextPlan) -> Iterator[str]:
    yield from result.assumptions
    yield from (note.message for note in result.notes)
    refused: dict[str, list[MatrixCell]] = {}
    for cell in result.matrix:
        if cell.reason:
            refused.setdefault(cell.reason, []).append(cell)
    for reason, (first, *others) in refused.items():
        requests = "1 request" if first.requests == 1 else f"{first.requests} requests"
        more = f" and {len(others)} more without a figure" if others else ""
        yield f"{requests} of {first.context_tokens} tokens{more}: {reason}"
