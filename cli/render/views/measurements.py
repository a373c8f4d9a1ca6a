"""A table of measurements, and a page with the figures of one measurement."""

from collections.abc import Iterator, Sequence

from memfit.cli.render.document import Document, Heading, Table, Text
from memfit.cli.render.views.tune_text import NOTHING, first_token, rate, seconds, size
from memfit.estimators.base.units import Units
from memfit.estimators.runtimes.measurement import MeasuredTraining, Measurement
from memfit.estimators.sizing.measurement_lookup import workload_words
from memfit.probes.figures import FIGURES, TuneFigure, measured_figures, paired_figures
from memfit.probes.speed import median_speed

_HEADINGS = ("Id", "Measured", "Model", "Workload", "Peak")


def to_table(measurements: Sequence[Measurement], units: Units) -> Document:
    """Return a row for each measurement; names wrap on a narrow terminal."""
    rows = [_row(measurement, units) for measurement in measurements]
    return (Table(_HEADINGS, rows, align="llllr", wrapped=(2, 3)),)


def to_document(measurement: Measurement, units: Units) -> Document:
    """Return every figure of a measurement with its spread over the repeats."""
    rows = [
        (
            FIGURES[figure.name].label,
            size(figure.measured_bytes, units),
            size(figure.spread_bytes, units) if figure.spread_bytes else NOTHING,
        )
        for figure in _figures(measurement)
        if measurement.training is None or figure.name in ("weights", "active", "peak")
    ]
    return (
        Heading(measurement.model),
        Text(tuple(_facts(measurement)), style="dim", mark="-"),
        Table(("Figure", "Median", "Spread"), rows),
        *_steps(measurement.training, units),
        *_restores(measurement, units),
        Text([", ".join(_speeds(measurement))], gap=True),
    )


def _steps(training: MeasuredTraining | None, units: Units) -> Document:
    """Return the peaks of a trainer's steps, where it ran."""
    if training is None:
        return ()
    rows = [
        ("Validation", size(training.validation_bytes, units)),
        ("First step", size(training.first_step_bytes, units)),
        ("Later steps", size(training.later_steps_bytes, units)),
    ]
    return (Table(("Peak of", "Size"), rows),)


def _restores(measurement: Measurement, units: Units) -> Document:
    """Return the restores of stored caches, where there are any."""
    rows = [
        (
            str(cache.bits),
            size(cache.file_bytes, units),
            seconds(cache.write_ns),
            restore.way,
            size(restore.peak_bytes, units),
            seconds(restore.restore_ns),
        )
        for cache in measurement.caches
        for restore in cache.restores
    ]
    headings = ("Bits", "File", "Written in", "Way", "Peak", "Restored in")
    return (Table(headings, rows, "Stored and restored"),) if rows else ()


def _row(measurement: Measurement, units: Units) -> tuple[str, ...]:
    (peak,) = (figure for figure in _figures(measurement) if figure.name == "peak")
    return (
        measurement.id,
        measurement.measured_at[:10],
        measurement.model,
        _task(measurement),
        size(peak.measured_bytes, units),
    )


def _task(measurement: Measurement) -> str:
    """The workload, the experts that were in memory, and the bits of stored caches."""
    words, experts = workload_words(measurement.workload), measurement.experts
    if training := measurement.training:
        recipe = training.recipe
        layers = recipe.num_layers if recipe.num_layers > 0 else "all"
        return (
            f"{recipe.fine_tune_type} of {layers} layers, batch {recipe.batch_size},"
            f" {recipe.max_seq_length} tokens"
        )
    if measurement.caches:
        bits = ", ".join(str(cache.bits) for cache in measurement.caches)
        return f"{words}, cache stored in {bits} bits"
    return f"{words}, {experts.capacity} experts, {experts.policy}" if experts else words


def _facts(measurement: Measurement) -> Iterator[str]:
    yield f"{measurement.id}, checkpoint {measurement.fingerprint[:16]}"
    yield (
        f"measured {measurement.measured_at} on {measurement.device} ({measurement.backend}) with"
        f" mlx {measurement.mlx_version}, mlx-lm {measurement.mlx_lm_version} and memfit"
        f" {measurement.memfit_version}"
    )
    runs = len(measurement.runs)
    yield f"{_task(measurement)}; {runs} run{'' if runs == 1 else 's'}"
    if measurement.wired_limit_bytes is not None:
        yield f"with a wired limit of {measurement.wired_limit_bytes} bytes"


def _figures(measurement: Measurement) -> tuple[TuneFigure, ...]:
    taken = measured_figures(
        measurement.loaded,
        measurement.runs,
        (measurement.swift_workspace_bytes, measurement.swift_kv_bytes),
        measurement.warm_up,
    )
    return paired_figures(taken, {})


def _speeds(measurement: Measurement) -> Iterator[str]:
    yield f"loaded in {seconds(measurement.loaded.load_ns)}"
    if measurement.training:
        return
    if rates := median_speed(measurement.workload, measurement.runs):
        yield f"{first_token(measurement.workload)} {seconds(rates.first_token_ns)}"
        yield f"prefill {rate(rates.prefill_tokens_per_second)} tokens/s"
        if rates.decode_tokens_per_second is not None:
            yield f"decode {rate(rates.decode_tokens_per_second)} tokens/s"
