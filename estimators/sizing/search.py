"""The best setting that fits: one search, used for every setting memfit recommends.

Candidates are listed from the most wanted to the least wanted: the longest context first, the
most bits first, the cheapest change first. The answer is the first one that fits.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import round_down
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.budget import Need, judge, recommended_bytes
from memfit.estimators.sizing.sized_model import SizedModel

CONTEXT_STEP = 256
PREFILL_STEPS = (2048, 1024, 512, 256, 128)
KV_BITS = (None, 8, 4)
# The longest context searched when neither the config nor the runtime has a limit.
UNBOUNDED_CONTEXT = 2**20

# Values that are guessed by a curve before one is known to be too large.
_BY_CURVE = 6
# Values that are guessed by a line before the middle is taken: needs with steps have no line.
_BY_LINE = 12

Candidate = TypeVar("Candidate")


def first_fitting(
    candidates: Sequence[Candidate], fits: Callable[[Candidate], bool], *, monotone: bool = False
) -> Candidate | None:
    """Return the first candidate that fits, None when none does.

    ``monotone`` states that all candidates after a fitting one fit too: of n candidates at most
    log2(n) + 1 are then evaluated. Otherwise they are evaluated in order. A candidate that is
    refused does not fit (`is_accepted`).

    >>> first_fitting(range(4096, 0, -256), lambda tokens: tokens <= 1000, monotone=True)
    768
    """
    if not monotone:
        return next((each for each in candidates if is_accepted(fits, each)), None)
    place = bisect_left(candidates, True, key=lambda each: is_accepted(fits, each))
    return candidates[place] if place < len(candidates) else None


def halves(value: int, least: int) -> Iterator[int]:
    """Yield the half of a value, the half of that and so on, none below ``least``, 0 once."""
    while value and value // 2 >= least:
        value //= 2
        yield value


def most_fitting(
    values: Sequence[int],
    needed: Callable[[int], int],
    limit: int,
    known: Sequence[int],
    *,
    floor: int = 0,
) -> int:
    """Return the largest of ascending values with a need within the limit, 0 when none has.

    The need grows with the value. It is computed for few values: those that are ``known`` or next
    to these, then where the curve through three of them reaches the limit. ``floor`` is about the
    need of nothing. What is far beyond the limit by two computed needs below it is not computed.

    >>> most_fitting(range(1, 1000), lambda value: value * value, 5000, [10])
    70
    """
    points = {0: floor}
    low, high = 0, len(values)
    guesses = [min(range(high), key=lambda index: abs(values[index] - value)) for value in known]
    count = 0
    while low < high:
        if guesses:
            guess = guesses.pop(0)
        elif _is_beyond(values[low], points, limit):
            break
        else:
            # A need with steps would come near from one side only: every fourth time the middle,
            # once a value is known to be too large.
            is_curve = count % 4 < 3 or (high == len(values) and count < _BY_CURVE)
            guess = _reached(values, points, limit) if is_curve else (low + high) // 2
            guess = max(low, min(high - 1, guess))
            count += 1
        value = values[guess]
        points[value] = needed(value)
        if points[value] <= limit:
            low = max(low, guess + 1)
        else:
            high = min(high, guess)
    return values[low - 1] if low else 0


def _reached(values: Sequence[int], points: Mapping[int, int], limit: int) -> int:
    """Return the index of about the last value with a need within the limit."""
    # A parabola: products of all tokens with all tokens grow with the square.
    near = sorted(points, key=lambda value: (abs(points[value] - limit), value))[:3]
    slopes = [(points[b] - points[a]) / (b - a) for a, b in pairwise(sorted(near))]
    if not slopes or min(slopes) <= 0:
        return len(values) // 2
    first, second, *last = sorted(near)
    bend = max(0.0, (slopes[1] - slopes[0]) / (last[0] - first)) if last else 0.0

    def need(value: int) -> int:
        return points[first] + int((value - first) * (slopes[0] + bend * (value - second)))

    return bisect_right(values, limit, key=need) - 1


def _is_beyond(value: int, points: Mapping[int, int], limit: int) -> bool:
    """Whether the need of a value is above the limit, also with a rise of seven eighths."""
    # The need of nothing is not exact enough.
    below = sorted(point for point in points if 0 < point < value)[-2:]
    if len(below) < 2:
        return False
    first, last = below
    rise = (points[last] - points[first]) * (value - last)
    return points[last] + rise * 7 // (8 * (last - first)) > limit


def is_accepted(fits: Callable[[Candidate], bool], candidate: Candidate) -> bool:
    """Return whether a candidate fits.

    One that no workload may have (InputError) or that the runtime cannot run (UnsupportedError)
    does not fit.
    """
    try:
        return fits(candidate)
    except (InputError, UnsupportedError):
        return False


def fits_comfortably(sized: SizedModel, workload: Workload) -> bool:
    """Return whether a workload fits the device and leaves a tenth of the working set free.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    return judge(sized.requirement(workload), sized.device)[0] == "fits"


def longest_prompt(sized: SizedModel) -> int:
    """Return the longest prompt to search, in tokens: the model's limit or the runtime's lower."""
    limits = (sized.model.max_context, sized.runtime_model.runtime.max_context)
    return min(filter(None, limits), default=UNBOUNDED_CONTEXT)


def context_lengths(most: int) -> range:
    """Return the multiples of 256 tokens up to ``most``, the longest first."""
    return range(round_down(most, CONTEXT_STEP), 0, -CONTEXT_STEP)


def longest_context(
    sized: SizedModel,
    workload: Workload,
    most: int,
    *,
    fits_at: int = 0,
    requirement: Callable[[Workload], Need] | None = None,
) -> int | None:
    """Return the longest prompt up to ``most`` tokens that fits, all else as in ``workload``.

    A prompt of ``fits_at`` tokens is known to fit. Another ``requirement`` than that of the sized
    model can decide.
    """
    device, needed = sized.device, requirement or sized.requirement
    if device is None or (least := least_excess(sized, device)) > 0:
        return None

    def excess(steps: int) -> int | None:
        # Without a prompt nothing is needed but the weights.
        prompt = workload.prompt_only(steps * CONTEXT_STEP) if steps else None
        return _excess(needed(prompt), device) if prompt else least

    steps = largest_within(excess, fits_at // CONTEXT_STEP, most // CONTEXT_STEP)
    return steps * CONTEXT_STEP or None


def largest_within(excess: Callable[[int], int | None], low: int, high: int) -> int:
    """Return the largest whole number from ``low``, which fits, to ``high`` that fits.

    ``excess`` is by how much a number is over, at most 0 where it fits, None where it does not fit
    for another reason; a number that is refused (`is_accepted`) does not fit. What is over grows
    almost in proportion: the next number is where the line between the two ends meets the limit,
    and nearer to an end that stays (the Illinois method).

    >>> tried = []
    >>> largest_within(lambda value: tried.append(value) or 3 * value - 1000, 0, 10**6), len(tried)
    (333, 4)
    """
    if high <= low:
        return low
    over = _try(excess, high)
    if over is not None and over <= 0:
        return high
    below, turn, stayed = _try(excess, low), 0, 0
    while high - low > 1:
        turn += 1
        middle = (low + high) // 2
        # The low end may be over where a shorter prompt takes more than the one that fits.
        if below is not None and below <= 0 and over is not None and turn < _BY_LINE:
            middle = min(max(low + (high - low) * -below // (over - below), low + 1), high - 1)
        excess_there = _try(excess, middle)
        if excess_there is not None and excess_there <= 0:
            low, below = middle, excess_there
            over = max(1, over // 2) if over and stayed > 0 else over
            stayed = 1
        else:
            high, over = middle, excess_there
            below = below // 2 if below and stayed < 0 else below
            stayed = -1
    return low


def _try(excess: Callable[[int], int | None], number: int) -> int | None:
    """The excess, None when a number is refused or something else than the peak is over."""
    try:
        return excess(number)
    except (InputError, UnsupportedError):
        return None


def _excess(need: Need, device: Device) -> int | None:
    """By how much a need is above what it may take, at most 0 when it fits.

    None where something else than the peak is over.
    """
    over = _over(need, device)
    fits = judge(need, device)[0] == "fits"
    return over if fits == (over <= 0) else None


def least_excess(sized: SizedModel, device: Device) -> int:
    """Return by how many bytes the weights alone are over what they may take."""
    weights, budget = sized.resident_bytes, sized.runtime_model.runtime.budget
    return _over(Need(weights + sized.margin_bytes, 0, weights, budget), device)


def _over(need: Need, device: Device) -> int:
    is_taken = need.budget and need.budget.is_taken
    needed_bytes = need.budgeted_bytes if is_taken else need.peak_bytes
    return needed_bytes - recommended_bytes(need.budget, device)


def with_kv_bits(workload: Workload, bits: int | None) -> Workload:
    """Return the workload with a KV cache of ``bits`` from the first token on."""
    start = workload.quantized_kv_start if bits is None else 0
    return replace(workload, kv_bits=bits, quantized_kv_start=start)
