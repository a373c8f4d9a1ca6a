"""Recommendations after a measurement: the search of estimates, over measured peaks.

    advise(sized, points) -> Recommendation
    with_wired_trial(session, points, recommendation, units) -> points and recommendation
    command_lines(sized, recommended_workload(...), model=..., prompt=...) -> tuple[str, ...]

A peak is the measured one where there is one, else that of the line through measured peaks.
Commands have only flags of the argument parsers of mlx_lm/generate.py and mlx_lm/server.py.
"""

import shlex
from collections.abc import Iterator, Sequence
from typing import ClassVar

from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device, wired_limit
from memfit.estimators.results.advice import Advice, Recommendation
from memfit.estimators.results.result import in_units
from memfit.estimators.results.terms import Basis
from memfit.estimators.runtimes.facets import Images
from memfit.estimators.runtimes.interface import Figure, MemoryFigures, RuntimeModel
from memfit.estimators.runtimes.mlx_lm import MlxLm
from memfit.estimators.runtimes.mlx_lm_commands import STDIN, generate_command, server_command
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.peak_fit import Line, Peak, ShortPrompt, calibration, line_through
from memfit.estimators.sizing.recommend import recommend_here
from memfit.estimators.sizing.search import with_kv_bits
from memfit.estimators.sizing.serving import server_flags
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.experiments.points import Points
from memfit.probes.result import Point


class MeasuredLine(MlxLm, Images, frozen=True):
    """A runtime with measured peaks, then those of the line through them, then estimates."""

    inner: RuntimeModel
    """The estimate of everything else."""
    requested: Workload
    """The line is valid for workloads that differ from it only in prompt and prefill step."""
    peaks: dict[Workload, int]
    line: Line | None

    _workspace_basis: ClassVar[tuple[Basis, int]] = ("measured", 0)

    def resident_bytes(self) -> int:
        """Return those of the estimate, which has the vision tower where it is loaded."""
        return self.inner.resident_bytes()

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes.

        The line never gives less than weights and caches, which are exact. A step larger than
        the line's own takes at least the estimate, since attention scores grow with the product
        of step and prompt. Without a line, an estimate that was too low is raised.
        """
        figures = self.inner.figures(workload)
        kept = self.resident_bytes() + figures.kv.nbytes + figures.ssm_bytes
        if (measured := self.peaks.get(workload)) is not None:
            return _with_peak(figures, measured, kept)
        if _setting(workload) != _setting(self.requested):
            return figures
        if self.line is None:
            return _with_peak(figures, figures.moment.nbytes + self._missed_bytes, kept)
        step = min(workload.prefill_step, max(1, workload.prompt_tokens - 1))
        tokens = workload.prompt_tokens
        peak = self.line.peak_bytes(tokens, step) + self.line.error_bytes(tokens)
        if step > self.line.prefill_step:
            peak = max(peak, figures.moment.nbytes)
        return _with_peak(figures, max(peak, kept), kept)

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return the estimate's basis of a workspace where the figures are the estimate's."""
        if figure == "workspace" and workload not in self.peaks:
            estimated = self.inner.figures(workload).moment.nbytes
            if self.line is None or self.figures(workload).moment.nbytes == estimated:
                return self.inner.basis(figure, workload)
        return super().basis(figure, workload)

    @property
    def _missed_bytes(self) -> int:
        """How far the estimate was below the measured peak, so that it is likely to be again."""
        estimated = self.inner.figures(self.requested).moment.nbytes
        return max(0, self.peaks.get(self.requested, 0) - estimated)

    def comparing(self, *workloads: Workload) -> RuntimeModel:
        """Return the measured peaks where all are measured, else the estimate of all."""
        return self if self.peaks.keys() >= set(workloads) else self.inner


def line_of(points: Sequence[Point]) -> Line | None:
    """Return the line through the points with the settings of the first, None without one.

    It is at the first point's prefill step, or at the largest with several prompts. A line that
    falls with the prompt is not used: such peaks have another cause.
    """
    requested = points[0].workload
    peaks = [
        Peak(p.workload.prompt_tokens, p.workload.prefill_step, p.peak_bytes)
        for p in points
        if _counts(p) and p.peak_bytes is not None and _setting(p.workload) == _setting(requested)
    ]
    steps = sorted({peak.prefill_step for peak in peaks}, reverse=True)
    for step in (requested.prefill_step, *steps):
        line = line_through(peaks, prefill_step=step)
        if line and line.per_token[0] >= 0:
            return line
    return None


def by_measurement(sized: SizedModel, points: Sequence[Point], line: Line | None) -> SizedModel:
    """Return the model with measured peaks instead of estimates, where points give them."""
    inner = sized.formula_view().runtime_model
    peaks = {p.workload: p.peak_bytes for p in points if _counts(p) and p.peak_bytes is not None}
    requested = points[0].workload
    measured = MeasuredLine(inner.runtime, inner.subject, inner, requested, peaks, line)
    return replace(sized, runtime_model=measured, _answers={})


def advise(sized: SizedModel, points: Sequence[Point], units: Units = Units.GB) -> Recommendation:
    """Return the settings for the first point's workload; ``basis`` says what they rest on.

    ``sized`` is the estimate that the points were compared with.
    """
    requested, line = points[0].workload, line_of(points)
    found = in_units(recommend_here(by_measurement(sized, points, line), requested), units)
    return replace(found, basis=tuple(_basis(sized, points, line, units)))


def _counts(point: Point) -> bool:
    return point.status == "measured" and point.wired_limit_bytes is None


def _with_peak(figures: MemoryFigures, peak_bytes: int, kept_bytes: int) -> MemoryFigures:
    moment = replace(
        figures.moment, nbytes=peak_bytes, workspace_bytes=max(0, peak_bytes - kept_bytes)
    )
    return replace(figures, moment=moment)


def _setting(workload: Workload) -> Workload:
    """Everything in a workload that is the same along a line."""
    return replace(workload, prompt_tokens=1, max_tokens=0, prefill_step=1)


def _basis(
    sized: SizedModel, points: Sequence[Point], line: Line | None, units: Units
) -> Iterator[str]:
    measured = sum(point.status == "measured" for point in points)
    if not measured:
        yield "nothing was measured: all of this is based on the estimate"
    elif line:
        yield _explained(line, units)
    else:
        peaks = "peak" if measured == 1 else "peaks"
        text = f"based on {measured} measured {peaks} and the estimate"
        yield text + _too_short(points[0].workload, sized.model.max_context)


def _too_short(workload: Workload, limit: int | None) -> str:
    """What to run to get a line, when the prompt is too short for one."""
    short = calibration(workload)
    if not isinstance(short, ShortPrompt):
        return ""
    text = f"; a prompt of {short.least_tokens} tokens"
    if limit and short.least_tokens + workload.max_tokens > limit:
        most = max(1, limit - workload.max_tokens)
        longest = calibration(replace(workload, prompt_tokens=most))
        step = longest.largest_step if isinstance(longest, ShortPrompt) else None
        if not step:
            return ""
        text = f"; a prompt of {3 * step + 1} tokens in prefill steps of {step}"
    return f"{text} would show how much each token adds"


def _explained(line: Line, units: Units) -> str:
    """The line in words; a fraction of a byte is rounded up."""
    text = f"based on {line.points} measured peaks and a line through them, valid near them; its"
    text += f" terms are not parts of the memory: {format_bytes(line.fixed_bytes, units)}"
    text += f" + {_rounded(line.per_token, units)} per prompt token"
    if line.per_chunk_token:
        text += f" + {_rounded(line.per_chunk_token, units)} per token of the prefill step"
    if line.residual_bytes is None:
        return f"{text}; no third peak confirms it"
    if line.residual_bytes == 0:
        return f"{text}; a third peak is on it"
    off = format_bytes(abs(line.residual_bytes), units)
    side = "above" if line.residual_bytes > 0 else "below"
    longest = line.measured_tokens[1]
    return (
        f"{text}; a third peak is {off} {side} it: that much is kept free, and proportionally more"
        f" beyond {longest} tokens"
    )


def _rounded(ratio: tuple[int, int], units: Units) -> str:
    return format_bytes(-(-ratio[0] // ratio[1]), units)


def recommended_workload(
    sized: SizedModel, requested: Workload, recommendation: Recommendation
) -> Workload | None:
    """Return the requested workload with as many recommended settings as fit together.

    None when none of them fits. ``sized`` carries the measured peaks.
    """
    bits, step = recommendation.kv_bits, recommendation.prefill_step.value
    step = step or requested.prefill_step
    cached = with_kv_bits(requested, bits.value) if bits.state == "change" else requested
    candidates = (replace(cached, prefill_step=step), replace(requested, prefill_step=step), cached)
    return next((each for each in candidates if _fits(sized, each)), None)


def command_lines(
    sized: SizedModel,
    workload: Workload,
    *,
    model: str,
    prompt: str | None,
    prompt_file: str | None = None,
) -> tuple[str, ...]:
    """Return the commands for mlx_lm.generate and mlx_lm.server, quoted for a shell.

    Without ``prompt`` the command reads ``prompt_file``, else standard input.

    The server handles one request at a time, as measured; there is no command for it where no flags
    of it fit in every order of requests. Each request sets its own number of tokens.
    """
    line = generate_command(model, workload, prompt or STDIN)
    if prompt is None and prompt_file is not None:
        line += f" < {shlex.quote(prompt_file)}"
    flags = server_flags(sized, workload)
    return (line, server_command(model, workload, flags)) if flags else (line,)


def _fits(sized: SizedModel, workload: Workload) -> bool:
    try:
        return judge(sized.requirement(workload), sized.device)[0] == "fits"
    except UnsupportedError:
        return False


def with_wired_trial(
    session: Points,
    points: tuple[Point, ...],
    recommendation: Recommendation,
    units: Units,
) -> tuple[tuple[Point, ...], Recommendation]:
    """Return the points, on Metal with a further one: the first workload with the limit set.

    Other backends have no limit to set: the recommendation says what the limit would be, and that
    nothing was changed. The measuring process restores the limit after the run.
    """
    device, first = session.sized.device, points[0]
    if device is None or first.status != "measured":
        return points, with_wired_reason(recommendation, "not tried: the workload was not measured")
    if device.backend != "metal":
        return points, _without_wired_limit(session, points, recommendation, device, units)
    if (limit := recommendation.wired_limit_bytes.value) is None:
        return points, with_wired_reason(recommendation, "none is recommended, so none was tried")
    return (*points, session.measure(first.workload, wired_limit_bytes=limit)), recommendation


def with_wired_reason(recommendation: Recommendation, reason: str) -> Recommendation:
    advice = recommendation.wired_limit_bytes
    reasons = "; ".join(filter(None, (advice.reason, reason)))
    return replace(recommendation, wired_limit_bytes=replace(advice, reason=reasons))


def _without_wired_limit(
    session: Points,
    points: tuple[Point, ...],
    recommendation: Recommendation,
    device: Device,
    units: Units,
) -> Recommendation:
    first, context = points[0].workload, recommendation.context_tokens.value
    workload = replace(first, prompt_tokens=context, max_tokens=0) if context else first
    sized = by_measurement(session.sized, points, line_of(points))
    figures, need = sized.figures_for(workload), sized.requirement(workload)
    limit = wired_limit(need.peak_bytes, device).nbytes
    caches = figures.kv.nbytes + figures.ssm_bytes
    workspace = figures.moment.nbytes - sized.resident_bytes - caches
    parts = {"weights": sized.resident_bytes, "caches": caches, "workspace": workspace}
    listed = ", ".join(f"{name} {format_bytes(size, units)}" for name, size in parts.items())
    # A Mac's own policies begin with the whole working set where no limit can be set.
    is_mac = device.name.startswith("Apple")
    alone = "by policy, with a baseline or a cap," if is_mac else "by policy alone"
    reason = (
        f"{format_limit(limit, units)} {alone} for {workload.total_tokens}"
        f" tokens ({listed}, margin {format_bytes(sized.margin_bytes, units)}); the"
        f" {device.backend} backend has no wired limit, nothing was set"
    )
    return replace(recommendation, wired_limit_bytes=Advice("keep", limit, reason))
