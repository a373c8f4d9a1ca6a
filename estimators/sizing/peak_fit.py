"""Peaks that were measured, made into a line: what is fixed, what a token adds, what a chunk adds.

    calibration(workload) -> tuple[Workload, ...] | ShortPrompt    what to measure for a line
    line_through(peaks, prefill_step=512) -> Line | None           the line through it
    Line.at(tokens, prefill_step) -> int                           what it says of another setting
    Line.allowance(tokens) -> int                                  how far off it may be there

The arithmetic is of fractions throughout: a line goes through the points it was solved from, to
the byte.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple

from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import MAX_CHUNKS, Workload

_CONFIRMED = 3  # two points solve, the third confirms
_PARTS_OF_STEP = (2, 4)


class Peak(NamedTuple):
    """The peak of one prompt of ``tokens``, read in chunks of ``prefill_step``."""

    tokens: int
    prefill_step: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """``peak = fixed + per_token * tokens + per_chunk_token * prefill step``, all bytes.

    Coefficients are (numerator, denominator); ``fixed_bytes`` is rounded up to a whole byte. They
    hold along the two axes they were measured on, prompts at ``prefill_step`` and steps at
    ``tokens``: attention scores grow with the product of both.
    """

    tokens: int
    prefill_step: int
    measured_tokens: tuple[int, int]  # the shortest prompt and the longest
    fixed_bytes: int
    per_token: tuple[int, int]
    per_chunk_token: tuple[int, int] | None  # None when one step only was measured
    residual_bytes: int | None  # the farther third point, measured less predicted; None without
    points: int

    def at(self, tokens: int, prefill_step: int) -> int:
        """Return the peak of a prompt; where one step was measured, that of this step."""
        slope = Fraction(*self.per_chunk_token) if self.per_chunk_token else 0
        # `fixed_bytes` is less than a byte too large: rounded down, measured points come out exact.
        return floor(self.fixed_bytes + Fraction(*self.per_token) * tokens + slope * prefill_step)

    def allowance(self, tokens: int) -> int:
        """Return the residual's size; beyond the prompts that were measured it grows in proportion.

        An error of the slope does: measured up to 1000 tokens, it is twice as much at 2000.
        """
        shortest, longest = self.measured_tokens
        reached = max(tokens, longest) - shortest
        return ceil_div(abs(self.residual_bytes or 0) * reached, longest - shortest)


@dataclass(frozen=True, slots=True)
class ShortPrompt:
    """A prompt of too few chunks to tell tokens and chunks apart; either setting mends it."""

    least_tokens: int
    largest_step: int | None


def calibration(workload: Workload) -> tuple[Workload, ...] | ShortPrompt:
    """Return the workloads that tell the line of one: three prompts, and three steps.

    Every chunk of each is full: a prompt is a whole number of steps and its last token, which is
    read alone (mlx-lm generate.py, generate_step).

    >>> [w.prompt_tokens for w in calibration(Workload(prompt_tokens=5000, prefill_step=512))]
    [4609, 2049, 1025, 4609, 4609]
    """
    step = workload.prefill_step
    whole = workload.prompt_tokens - 1
    chunks = whole // step
    if chunks < _CONFIRMED:
        largest = whole // _CONFIRMED
        return ShortPrompt(_CONFIRMED * step + 1, (1 << largest.bit_length()) >> 1 or None)
    counts = (chunks, max(2, chunks // 2), max(1, chunks // 4))
    prompts = [replace(workload, prompt_tokens=count * step + 1) for count in counts]
    parts = [step // part for part in _PARTS_OF_STEP if step % part == 0]
    steps = [each for each in parts if prompts[0].prompt_tokens <= each * MAX_CHUNKS]
    return (*prompts, *(replace(prompts[0], prefill_step=each) for each in steps))


def line_through(peaks: Iterable[Peak], *, prefill_step: int) -> Line | None:
    """Return the line through measured peaks, None when they are of fewer than two prompts.

    The two longest prompts solve, as what is asked of a line lies beyond them; then the step and
    the largest other one; the next along each axis confirms. Prompts with a chunk cut short are
    left out: their peak is not of the step.
    """
    full = {(each.tokens, each.prefill_step): each.nbytes for each in peaks if _is_full(each)}
    prompts = sorted((tokens for tokens, step in full if step == prefill_step), reverse=True)
    if len(prompts) < 2:
        return None
    tokens = max(prompts[:2], key=lambda each: sum(each == other for other, _ in full))
    others = sorted((s for t, s in full if t == tokens and s != prefill_step), reverse=True)
    by_prompt = [(each, full[each, prefill_step]) for each in prompts[:_CONFIRMED]]
    by_step = [(each, full[tokens, each]) for each in [prefill_step, *others][:_CONFIRMED]]
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
    """The slope through the first two points, and how far above the line the third lies.

    The residual is rounded away from zero: a miss is never made smaller.
    """
    (first, first_bytes), (second, second_bytes), *rest = points
    slope = Fraction(first_bytes - second_bytes, first - second)
    misses = [nbytes - first_bytes - slope * (setting - first) for setting, nbytes in rest]
    return slope, next((ceil(miss) if miss > 0 else floor(miss) for miss in misses), None)


def _is_full(peak: Peak) -> bool:
    """Whether every chunk has the step's tokens, the last perhaps one less."""
    return peak.tokens > peak.prefill_step and peak.tokens % peak.prefill_step in (0, 1)
