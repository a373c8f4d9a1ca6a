"""A measured mixture of experts as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import Bar, BarChart, Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.tune_text import NOTHING, rate, seconds, size
from memfit.estimators.base.units import Units, format_bytes
from memfit.probes.experts.result import ExpertsPoint, ExpertsTuneResult, SlotTraffic

_MEMORY = (
    "Experts",
    *("Weights", "planned"),
    *("Start-up", "planned"),
    *("Prefill", "planned"),
    *("Decode", "planned"),
)
_SPEED = ("Experts", "Loaded in", "Prefill/s", "Decode/s", "Coverage", "Misses", "Read", "Waits")
_AGREEMENT = (
    *("Experts", "Equal", "Leading", "Divergence", "Largest"),
    *("Pinned", "Profiled", "Filler"),
)
_COLOURS = {True: "green", False: "yellow", None: "default"}


@view(ExpertsTuneResult)
def to_document(result: ExpertsTuneResult, units: Units, plot: bool = False) -> Document:
    """Return the tables of all capacities, and the answer; ``plot`` adds a chart."""
    rows = [
        (f"{point.capacity}{', wired' if point.wired_limit_bytes else ''}", point)
        for point in result.points
    ]
    if result.full:
        rows.insert(0, ("all, mlx-lm", result.full))
    memory = tuple((name, *_memory(point, units)) for name, point in rows)
    speed = tuple((name, *_speed(point, units)) for name, point in rows)
    agreement = tuple((name, *_agreement(point)) for name, point in rows)
    return report(
        title=result.model,
        facts=tuple(_facts(result, units)),
        tables=(
            Table(_MEMORY, memory, "Memory", droppable=(2, 6, 8, 4)),
            Table(_SPEED, speed, "Speed; misses, reads and waits for each generated token"),
            Table(_AGREEMENT, agreement, "Agreement with the full model, and slots"),
        ),
        verdict=_verdict(result),
        colour=_COLOURS[result.answer.pays],
        sections=(
            ("Does it pay off", result.answer.reasons),
            ("Not measured", tuple(_unmeasured(result))),
            ("Prepacked", tuple(_warm(result, units))),
            ("Beyond the stated error: please report these lines", result.report),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
        charts=(_chart(rows, units),) if plot else (),
    )


def _facts(result: ExpertsTuneResult, units: Units) -> Iterator[str]:
    work = result.workload
    yield (
        f"{result.model_type}, {result.experts} experts in each of {result.layers} layers,"
        f" {result.top_k} per token: {format_bytes(result.expert_bytes, units)}"
    )
    yield (
        f"{work.prompt_tokens} prompt tokens + {work.max_tokens} generated, prefill step"
        f" {work.prefill_step}; policy {result.policy}; mlx {result.mlx_version}, mlx-lm"
        f" {result.mlx_lm_version}"
    )
    found = result.discovery
    share = (
        ""
        if found.agreement_percent is None
        else f"; {found.agreement_percent:.1f} % of their choices are the full model's"
    )
    yield (
        f"routers alone: {format_bytes(found.peak_bytes, units)} to load, no expert is read{share}"
    )
    source = "the full model" if result.profile_of_full_model else "the routers alone"
    held_out = result.held_out_prompts
    measured = f"held-out prompts: {held_out}" if held_out else "the same prompts are measured"
    yield (
        f"profile of {source}: {result.profiled_prompts} prompts, {result.profiled_tokens} tokens,"
        f" {result.universal_experts} universal experts; {measured}"
    )


def _memory(point: ExpertsPoint, units: Units) -> Iterator[str]:
    for figure in (point.weights, point.startup, point.prefill_peak, point.decode_peak):
        yield size(figure.measured_bytes, units)
        yield size(figure.planned_bytes, units)


def _speed(point: ExpertsPoint, units: Units) -> tuple[str, ...]:
    speed, traffic = point.speed, point.decode
    return (
        seconds(point.load_ns),
        rate(speed.prefill_tokens_per_second if speed else None),
        rate(point.decode_tokens_per_second),
        f"{point.coverage_percent:.1f} %",
        *(_per_token(traffic, units) if traffic and traffic.tokens else (NOTHING,) * 3),
    )


def _per_token(traffic: SlotTraffic, units: Units) -> tuple[str, str, str]:
    return (
        f"{traffic.per_token(traffic.misses):.2f}",
        format_bytes(int(traffic.per_token(traffic.read_bytes)), units),
        f"{traffic.per_token(traffic.wait_ns) / 1e6:.2f} ms",
    )


def _agreement(point: ExpertsPoint) -> tuple[str, ...]:
    found = point.agreement
    slots = (str(point.pinned_slots), str(point.profiled_slots), str(point.filler_slots))
    if found is None:
        return (NOTHING,) * 4 + slots
    difference = "identical" if found.identical else f"{found.largest_difference:.3g}"
    return (
        f"{found.same_tokens} of {found.tokens}",
        str(found.leading_tokens),
        f"{found.mean_divergence:.2g}",
        difference,
        *slots,
    )


def _verdict(result: ExpertsTuneResult) -> str:
    answer = result.answer
    limits = (
        f"at most {answer.slowdown_percent:g} % slower, at least {answer.agreement_percent:g} %"
        " equal tokens"
    )
    if answer.pays is None:
        return "Not known whether offloading pays: too little was measured."
    if not answer.pays:
        return f"Offloading does not pay: no smaller capacity is {limits}."
    return f"Offloading pays: keep {answer.capacity} of {result.experts} experts ({limits})."


def _unmeasured(result: ExpertsTuneResult) -> Iterator[str]:
    for point in result.points:
        if point.reason:
            yield f"{point.capacity} experts, {point.status}: {point.reason}"


def _warm(result: ExpertsTuneResult, units: Units) -> Iterator[str]:
    if warm := result.warm:
        yield (
            f"{warm.directory}: {warm.capacity} experts of each layer,"
            f" {format_bytes(warm.file_bytes, units)}"
        )
        yield (
            f"loaded in {seconds(warm.load_ns)}, from the checkpoint in"
            f" {seconds(warm.cold_load_ns)}; start-up takes"
            f" {format_bytes(warm.startup_bytes, units)}"
        )


def _chart(rows: list[tuple[str, ExpertsPoint]], units: Units) -> BarChart:
    bars = [
        Bar(name, point.parts, note=f"{rate(point.decode_tokens_per_second)} tokens/s")
        for name, point in rows
    ]
    kinds = ("weights", "rest of the run", "start-up above it")
    return BarChart(title="Memory and decode speed by experts", kinds=kinds, bars=bars, units=units)
