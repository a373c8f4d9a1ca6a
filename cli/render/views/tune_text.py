"""Texts for a tune result, shared by the table and Markdown."""

from collections.abc import Iterator
from decimal import Decimal

from memfit.cli.render.views.text import percent as share_percent
from memfit.cli.render.views.text import verdict_sentence
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.advice import FirstToken
from memfit.estimators.results.estimate import DecodeSpeed
from memfit.probes.figures import FIGURES, TuneFigure
from memfit.probes.result import Point, TuneResult
from memfit.probes.speed_tradeoff import rounded_rate

NOTHING = "-"


def figure_rows(point: Point, units: Units) -> Iterator[tuple[str, ...]]:
    """Yield name, estimate, measurement, difference, percent and spread of each figure."""
    for figure in point.figures:
        declared = FIGURES[figure.name]
        if declared.hides_zero and not (figure.measured_bytes or figure.estimated_bytes):
            continue
        yield (
            declared.label,
            size(figure.estimated_bytes, units),
            size(figure.measured_bytes, units),
            difference(figure, units),
            percent(figure),
            size(figure.spread_bytes, units) if figure.spread_bytes else NOTHING,
        )


def bases(result: TuneResult) -> str:
    """The method and the bases of the estimated figures."""
    basis = {figure.name: figure.basis for figure in result.points[0].figures if figure.basis}
    named = {"weights": "weights", "kv": "KV cache", "peak": "peak"}
    found = ", ".join(f"{text} {basis[name]}" for name, text in named.items() if name in basis)
    return f"estimated by {result.method}: {found}" if found else ""


def point_rows(points: tuple[Point, ...], units: Units) -> Iterator[tuple[str, ...]]:
    """Yield the settings of each point, its runs, peaks and speeds."""
    for point in points:
        peak = next((figure for figure in point.figures if figure.name == "peak"), None)
        work, speed = point.workload, point.speed
        yield (
            str(work.prompt_tokens) + (f" x {work.batch}" if work.batch > 1 else ""),
            str(work.prefill_step),
            str(work.kv_bits or "none") + (" wired" if point.wired_limit_bytes else ""),
            str(point.repeats or NOTHING),
            size(point.estimated_peak_bytes, units),
            size(point.peak_bytes, units) if point.peak_bytes is not None else point.status,
            percent(peak) if peak else NOTHING,
            rate(speed.prefill_tokens_per_second if speed else None),
            rate(speed.decode_tokens_per_second if speed else None),
        )


def reasons(points: tuple[Point, ...]) -> Iterator[str]:
    """Yield why points were not measured, or not completely: each reason once."""
    same: dict[str, list[Workload]] = {}
    for point in points:
        if point.reason:
            same.setdefault(f"{point.status}: {point.reason}", []).append(point.workload)
    for reason, works in same.items():
        more = f" and {len(works) - 1} more" if len(works) > 1 else ""
        yield f"{settings(works[0])}{more}: {reason}"


def settings(work: Workload) -> str:
    """The settings of a workload that a sweep varies."""
    return f"{work.prompt_tokens} tokens, {settings_without_context(work)}"


def settings_without_context(work: Workload) -> str:
    """The prefill step and the cache of a workload."""
    bits = f"{work.kv_bits}-bit" if work.kv_bits else "unquantised"
    batch = f"batch {work.batch}, " if work.batch > 1 else ""
    return f"{batch}prefill step {work.prefill_step}, {bits} KV cache"


def task(result: TuneResult) -> str:
    """The workload, and the versions that ran it."""
    work = result.points[0].workload
    text = f"{work.prompt_tokens} prompt token{'' if work.prompt_tokens == 1 else 's'}"
    if work.max_tokens:
        text += f" + {work.max_tokens} generated"
    if work.batch > 1:
        text = f"{work.batch} sequences of {text}"
    text += f", prefill step {work.prefill_step}"
    if work.kv_bits:
        text += f", {work.kv_bits}-bit KV cache from token {work.quantized_kv_start}"
    if work.max_kv_size:
        text += f", KV cache of at most {work.max_kv_size} tokens"
    return f"{text}; mlx {result.mlx_version}, mlx-lm {result.mlx_lm_version}"


def files(result: TuneResult, units: Units) -> str:
    """The bytes of the files, of the arrays made from them, and what MLX holds for these."""
    if not (loaded := result.loaded):
        return ""
    arrays = loaded.weights_bytes
    others = {"in files": result.file_bytes, "active in MLX": loaded.active_bytes}
    more = (
        f"{format_bytes(nbytes, units)} {name} ({signed(nbytes - arrays, units)})"
        for name, nbytes in others.items()
    )
    return f"weights: {format_bytes(arrays, units)} in arrays, {', '.join(more)}"


def speeds(result: TuneResult) -> Iterator[str]:
    """The times of the requested workload, a line for each phase, with the spread of repeats."""
    point = result.points[0]
    if loaded := result.loaded:
        yield f"loaded in {seconds(loaded.load_ns)}"
    if not (speed := point.speed):
        return
    first, spread = seconds(speed.first_token_ns), seconds(speed.first_token_spread_ns)
    first += _spread(point, spread) + _expected_seconds(result.first_token)
    yield f"{first_token(point.workload)} {first}; {_runs(point)}"
    prefill, decode = speed.prefill_tokens_per_second, speed.decode_tokens_per_second
    yield f"prefill {rate(prefill)} tokens/s{_spread(point, rate(speed.prefill_spread))}"
    if decode is not None:
        text = f"decode {rate(decode)} tokens/s{_spread(point, rate(speed.decode_spread))}"
        yield text + _expected_rate(result.decode_speed)
    if (batch := point.workload.batch) > 1:
        each = f"prefill {rate(prefill / batch)}"
        if decode is not None:
            each += f", decode {rate(decode / batch)}"
        yield f"for each request {each} tokens/s"


def _expected_seconds(expected: FirstToken | None) -> str:
    """The estimate beside a measured time, nothing without one."""
    if expected is None:
        return ""
    low, high = expected.range_seconds
    return f" (estimated {expected.seconds} s, {low} to {high})"


def _expected_rate(expected: DecodeSpeed | None) -> str:
    if expected is None or expected.range_tokens_per_second is None:
        return ""
    low, high = expected.range_tokens_per_second
    return f" (estimated {rate(low)} to {rate(high)})"


def first_token(work: Workload) -> str:
    """What the time to the first token means: without generation it is the prompt's time."""
    return "first token after" if work.max_tokens else "prompt read in"


def _spread(point: Point, spread: str) -> str:
    return f" (repeats differ by {spread})" if point.repeats > 1 else ""


def _runs(point: Point) -> str:
    return "1 run" if point.repeats == 1 else f"median of {point.repeats} runs"


def verdict(result: TuneResult, units: Units) -> str:
    point = result.points[0]
    if point.peak_bytes is None:
        return f"Not measured completely: {point.reason}."
    need, budget = point.peak_bytes + result.margin_bytes, result.device.working_set_bytes
    share = (
        f"measured peak and margin take {format_bytes(need, units)} of"
        f" {format_limit(budget, units)} ({share_percent(need, budget)})"
    )
    return verdict_sentence(result.verdict, result.exceeded, share)


def size(nbytes: int | None, units: Units) -> str:
    return NOTHING if nbytes is None else format_bytes(nbytes, units)


def difference(figure: TuneFigure, units: Units) -> str:
    """Measured minus estimated, with its sign."""
    nbytes = figure.difference_bytes
    return NOTHING if nbytes is None else signed(nbytes, units)


def signed(nbytes: int, units: Units) -> str:
    """A difference with its sign."""
    return f"{'+' if nbytes > 0 else ''}{format_bytes(nbytes, units)}"


def percent(figure: TuneFigure) -> str:
    """The difference in percent of the estimate, to a hundredth, never rounded to zero."""
    nbytes, whole = figure.difference_bytes, figure.estimated_bytes
    if nbytes is None or not whole:
        return NOTHING
    share = Decimal(100 * nbytes) / whole
    if nbytes and abs(share) < Decimal("0.01"):
        return f"{'+' if nbytes > 0 else '-'}<0.01 %"
    return f"{share:+.2f} %" if nbytes else "0 %"


def seconds(nanoseconds: int | None) -> str:
    """A time in seconds, to a millisecond below a minute."""
    if nanoseconds is None:
        return NOTHING
    time = Decimal(nanoseconds) / 10**9
    return f"{time:.3f} s" if time < 60 else f"{time:.1f} s"


def rate(tokens: float | None) -> str:
    """Tokens per second, with the digits that repeat between runs."""
    return NOTHING if tokens is None else rounded_rate(tokens)
