"""How fast a workload ran."""

from collections.abc import Sequence
from statistics import median_low

from msgspec import Struct

from memfit.estimators.base.units import Count, Number, Positive
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Run


class Speed(Struct, frozen=True, kw_only=True):
    """Medians over the repeats, each with its spread: largest minus smallest.

    Tokens per second are of all sequences of a batch.
    """

    first_token_ns: Positive
    prefill_tokens_per_second: Number
    """Only shown; no figure is computed from it."""
    decode_tokens_per_second: Number | None
    first_token_spread_ns: Count = 0
    prefill_spread: Number = 0.0
    """Tokens per second."""
    decode_spread: Number | None = None
    """Tokens per second."""


def median_speed(workload: Workload, runs: Sequence[Run]) -> Speed | None:
    """Return the medians of the repeats, None when there is no run."""
    if not runs:
        return None
    firsts = [run.first_token_ns for run in runs]
    prefill = [workload.batch * workload.prompt_tokens * 1e9 / max(1, first) for first in firsts]
    steps = workload.batch * (workload.max_tokens - 1)
    decode = [steps * 1e9 / run.decode_ns for run in runs if steps > 0 and run.decode_ns]
    return Speed(
        first_token_ns=median_low(firsts),
        prefill_tokens_per_second=median_low(prefill),
        decode_tokens_per_second=median_low(decode) if decode else None,
        first_token_spread_ns=max(firsts) - min(firsts),
        prefill_spread=max(prefill) - min(prefill),
        decode_spread=max(decode) - min(decode) if decode else None,
    )


def rate(amount: int, nanoseconds: int | None) -> int | None:
    """Return bytes or tokens per second, at least one; None without a time."""
    return max(1, amount * 10**9 // nanoseconds) if nanoseconds else None
