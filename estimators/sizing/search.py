"""The best setting that fits: one search, used for every setting memfit recommends.

Candidates are listed from the most wanted to the least wanted: the longest context first, the
most bits first, the cheapest change first. The answer is the first one that fits.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import round_down
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.sizing.sized_model import SizedModel

CONTEXT_STEP = 256
PREFILL_STEPS = (2048, 1024, 512, 256, 128)
KV_BITS = (None, 8, 4)
# The longest context searched when neither the config nor the runtime has a limit.
UNBOUNDED_CONTEXT = 2**20

Candidate = TypeVar("Candidate")


def first_fitting(
    candidates: Sequence[Candidate],
    fits: Callable[[Candidate], bool],
    *,
    monotone: bool = False,
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
    found = bisect_left(candidates, True, key=lambda each: is_accepted(fits, each))
    return candidates[found] if found < len(candidates) else None


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


def longest_context(sized: SizedModel, workload: Workload, most: int) -> int | None:
    """Return the longest prompt up to ``most`` tokens that fits, all else as in ``workload``."""
    return first_fitting(
        context_lengths(most),
        lambda tokens: fits_comfortably(sized, workload.prompt_only(tokens)),
        monotone=True,
    )


def with_kv_bits(workload: Workload, bits: int | None) -> Workload:
    """Return the workload with a KV cache of ``bits`` from the first token on."""
    start = workload.quantized_kv_start if bits is None else 0
    return replace(workload, kv_bits=bits, quantized_kv_start=start)
