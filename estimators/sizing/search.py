"""The best setting that fits: one search, and the smaller workloads that count too.

Candidates are listed from the most wanted to the least wanted: the longest context first, the
most bits first, the cheapest change first. The answer is the first one that fits.

MLX closes a command buffer by the elements of its arrays, so that fewer or shorter sequences can
leave more layers under way (docs/accuracy.md, "Not checked").
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import ceil_div, round_down
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.facets import OnMlx, is_grouped
from memfit.estimators.runtimes.runtime import Need, judge, recommended_bytes
from memfit.estimators.runtimes.source import Formula
from memfit.estimators.sizing.sized_model import SizedModel, peak_of

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


# Between two places where a layer less is under way the workspace grows with the tokens of a chunk
# and with the sequences: a sixteenth of them is a sixteenth of it, and its stated error a quarter.
_PARTS = 16


def can_take_more(sized: SizedModel) -> bool:
    """Whether a smaller workload can take more: on a GPU that MLX gives its work in batches.

    The bounds of other GPUs grow with the workload, and the CPU counts operations alone.
    """
    runtime_model = sized.runtime_model
    return bool(runtime_model.facet(OnMlx)) and runtime_model.subject.backend == "metal"


def are_compared(sized: SizedModel) -> bool:
    """Whether they are computed quickly: a trace takes seconds for each."""
    return isinstance(sized.runtime_model.source, Formula)


def largest_workload(sized: SizedModel, workload: Workload) -> Workload:
    """Return the one with the largest peak: ``workload``, fewer sequences or shorter prompts.

    The settings of the command stay, among them the prefill step. By trace it is ``workload``.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    if not (can_take_more(sized) and are_compared(sized)):
        return workload

    def peak_bytes(candidate: Workload) -> int:
        try:
            return peak_of(sized, candidate)
        except UnsupportedError:
            if candidate == workload:
                raise
            return 0  # a class may run this number of sequences and fail on fewer (gemma2)

    rows = batches(workload, is_grouped=is_grouped(sized.runtime_model, workload))
    # Of equal peaks the first counts, which is the workload's own.
    by_batch = max((replace(workload, batch=batch) for batch in rows), key=peak_bytes)
    return max(
        (
            replace(each, prompt_tokens=tokens)
            for each in dict.fromkeys((workload, by_batch))
            for tokens in prompts(workload)
        ),
        key=peak_bytes,
    )


def batches(workload: Workload, *, is_grouped: bool) -> Iterator[int]:
    """Yield sequences together, the workload's first; a group's, and two, four, ... groups.

    >>> list(batches(Workload(prompt_tokens=1, batch=20), is_grouped=True))
    [20, 8, 7, 6, 5, 4, 3, 2, 1, 16]
    """
    batch = workload.batch
    yield batch
    group = min(batch, workload.prefill_batch) if is_grouped else batch
    yield from range(group, 0, -ceil_div(group, _PARTS))
    while group * 2 < batch:
        group *= 2
        yield group


def prompts(workload: Workload) -> Iterator[int]:
    """Yield lengths of prompts, the workload's first: the last two chunks in parts, and whole ones.

    mlx-lm leaves the last token of a prompt to itself, so that a chunk's end is one token more.

    >>> list(prompts(Workload(prompt_tokens=100, prefill_step=32)))[:12]
    [100, 97, 96, 65, 64, 33, 32, 99, 97, 95, 93, 91]
    """
    tokens, step = workload.prompt_tokens, workload.prefill_step
    least = workload.least_prompt_tokens
    yield tokens
    last = (tokens - 1) // step * step
    ends = (last - back * step + more for back in range(3) for more in (1, 0))
    yield from (each for each in ends if least <= each < tokens)
    # A power of two: many kernels differ where a chunk is a multiple of 256.
    part = max(1, 1 << (min(step, tokens) // _PARTS).bit_length() >> 1)
    first = (tokens - 1) // part * part
    lengths = range(first + 1, max(least, tokens - 2 * step) - 1, -part)
    yield from (each for each in lengths if each < tokens)
