"""A line through measured peaks: a fixed part, a part per prompt token and one per step token.

All arithmetic uses fractions: a line goes exactly through the points it was solved from.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.units import Positive, ceil_div
from memfit.estimators.base.workload import Workload

_POINTS = 3  # along each axis: two solve the line, the third confirms it
_PARTS_OF_STEP = (2, 4)
_MOST_CHUNKS = 100_000  # of one measured prompt: each is a call of the model


class Peak(NamedTuple):
    """The measured peak of one prompt, processed in chunks of ``prefill_step`` tokens."""

    tokens: int
    prefill_step: int
    nbytes: int


class Line(Struct, frozen=True, kw_only=True):
    """``peak = fixed + per_token * tokens + per_chunk_token * prefill step``, all in bytes.

    It holds along the two axes it was measured on, prompts at ``prefill_step`` and steps at
    ``tokens``: attention scores grow with the product of both. A coefficient is a numerator and a
    denominator.
    """

    tokens: Positive
    """The prompt that steps were measured at."""
    prefill_step: Positive
    """The step that prompts were measured at."""
    measured_tokens: tuple[int, int]
    """The shortest and the longest measured prompt."""
    fixed_bytes: int
    """Rounded up to a whole byte."""
    per_token: tuple[int, int]
    per_chunk_token: tuple[int, int] | None
    """None when only one step was measured."""
    residual_bytes: int | None
    """The larger of the third points' distances, measured less predicted; None without one."""
    points: Positive
    """How many peaks the line is made from."""

    def peak_bytes(self, tokens: int, prefill_step: int) -> int:
        """Return the peak of a prompt; with one measured step, the peak at that step."""
        slope = Fraction(*self.per_chunk_token) if self.per_chunk_token else 0
        # `fixed_bytes` is less than a byte too large: rounding down gives measured points exactly.
        return floor(self.fixed_bytes + Fraction(*self.per_token) * tokens + slope * prefill_step)

    def error_bytes(self, tokens: int) -> int:
        """Return the bytes the line may be wrong by: the residual within the measured prompts.

        Beyond them it grows in proportion to the distance, as an error of the slope does.
        """
        shortest, longest = self.measured_tokens
        distance = max(tokens, longest) - shortest
        return ceil_div(abs(self.residual_bytes or 0) * distance, longest - shortest)


class ShortPrompt(Struct, frozen=True):
    """A prompt with too few chunks for a line; a change of either setting is enough."""

    least_tokens: int
    """The shortest prompt that is long enough at this step."""
    largest_step: int | None
    """The largest power of two that is small enough for this prompt, None without one."""


def calibration(workload: Workload) -> tuple[Workload, ...] | ShortPrompt:
    """Return the workloads to measure for the line of one: three prompts and three steps.

    All their chunks are full: a prompt is a whole number of steps and the last token, which
    mlx-lm processes alone (generate.py, generate_step).

    >>> [w.prompt_tokens for w in calibration(Workload(prompt_tokens=5000, prefill_step=512))]
    [4609, 2049, 1025, 4609, 4609]
    """
    step = workload.prefill_step
    whole = workload.prompt_tokens - 1
    chunks = whole // step
    if chunks < _POINTS:
        largest = whole // _POINTS
        return ShortPrompt(_POINTS * step + 1, (1 << largest.bit_length()) >> 1 or None)
    counts = (chunks, max(2, chunks // 2), max(1, chunks // 4))
    prompts = [replace(workload, prompt_tokens=count * step + 1) for count in counts]
    parts = [step // part for part in _PARTS_OF_STEP if step % part == 0]
    steps = [each for each in parts if prompts[0].prompt_tokens <= each * _MOST_CHUNKS]
    return (*prompts, *(replace(prompts[0], prefill_step=each) for each in steps))


def line_through(peaks: Iterable[Peak], *, prefill_step: int) -> Line | None:
    """Return the line through measured peaks, None with fewer than two prompts.

    The two longest prompts give the slope, since a line is used beyond them; so do the step and
    the largest other step. The next point along each axis confirms. Prompts with a shorter last
    chunk are left out: their peak is not that of the step.
    """
    full = {(each.tokens, each.prefill_step): each.nbytes for each in peaks if _is_full(each)}
    prompts = sorted((tokens for tokens, step in full if step == prefill_step), reverse=True)
    if len(prompts) < 2:
        return None
    tokens = max(prompts[:2], key=lambda each: sum(each == other for other, _ in full))
    others = sorted((s for t, s in full if t == tokens and s != prefill_step), reverse=True)
    by_prompt = [(each, full[each, prefill_step]) for each in prompts[:_POINTS]]
    by_step = [(each, full[tokens, each]) for each in [prefill_step, *others][:_POINTS]]
    per_token, residual = _solved(by_prompt)
    per_chunk_token, other_residual = _solved(by_step) if others else (None, None)
    rest = per_token * tokens + (per_chunk_token or 0) * prefill_step
    residuals = [each for each in (residual, other_residual) if each is not None]
    return Line(
        tokens=tokens,
        prefill_step=prefill_step,
        measured_tokens=(by_prompt[-1][0], by_prompt[0][0]),
        fixed_bytes=ceil(full[tokens, prefill_step] - rest),
        per_token=per_token.as_integer_ratio(),
        per_chunk_token=None if per_chunk_token is None else per_chunk_token.as_integer_ratio(),
        residual_bytes=max(residuals, key=abs, default=None),
        points=len(by_prompt) + len(by_step) - 1,
    )


def _solved(points: Sequence[tuple[int, int]]) -> tuple[Fraction, int | None]:
    """The slope through the first two points, and how far the third is above the line.

    The residual is rounded away from zero, so that it is never too small.
    """
    (first, first_bytes), (second, second_bytes), *rest = points
    slope = Fraction(first_bytes - second_bytes, first - second)
    misses = [nbytes - first_bytes - slope * (setting - first) for setting, nbytes in rest]
    return slope, next((ceil(miss) if miss > 0 else floor(miss) for miss in misses), None)


def _is_full(peak: Peak) -> bool:
    """Whether every chunk has as many tokens as the step, the last one perhaps one less."""
    return peak.tokens > peak.prefill_step and peak.tokens % peak.prefill_step in (0, 1)
