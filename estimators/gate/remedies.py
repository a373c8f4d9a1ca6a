"""What would mend a broken limit: settings that were tried, and pass."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.quantization import AFFINE_BITS
from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.sizing.search import (
    KV_BITS,
    PREFILL_STEPS,
    first_fitting,
    longest_context,
)

Setting = Literal["context", "kv_bits", "prefill_step", "quantize"]

# Which settings change which figure.
_ON_MEMORY: tuple[Setting, ...] = ("context", "kv_bits", "prefill_step", "quantize")
SETTINGS: dict[str, tuple[Setting, ...]] = {
    "peak": _ON_MEMORY,
    "wired_limit": _ON_MEMORY,
    "growth.peak": _ON_MEMORY,
    "load_peak": ("quantize",),
    "context": ("kv_bits", "prefill_step", "quantize"),
    "expert_capacity": ("quantize",),
    "growth.weights": ("quantize",),
    "growth.kv_per_token": ("kv_bits",),
    "basis": (),
}


@record(frozen=True, slots=True)
class Mend:
    """One setting that alone makes the limit pass, and the value it takes.

    ``context`` is the longest prompt that passes, a multiple of 256; ``kv_bits`` (from the first
    token on), ``prefill_step`` and ``quantize`` are the largest that pass.
    """

    setting: Setting
    value: int


@record(frozen=True, slots=True)
class Question:
    """A workload, and the bits the model would be converted to; None as it is."""

    workload: Workload
    quantize: int | None


def mends(
    limit: str,
    asked: Question,
    bits_per_weight: int,
    passes: Callable[[Question], bool],
) -> Iterator[Mend]:
    """Yield the settings that mend a broken limit; ``passes`` judges it at another question.

    ``bits_per_weight`` is what the weights have now, rounded up: only fewer are tried.
    """
    finders: dict[Setting, Callable[[], int | None]] = {
        "context": lambda: _context(asked, passes),
        "kv_bits": lambda: _kv_bits(asked, passes),
        "prefill_step": lambda: _prefill_step(asked, passes),
        "quantize": lambda: _quantize(asked, bits_per_weight, passes),
    }
    for setting in SETTINGS[limit]:
        if (value := finders[setting]()) is not None:
            yield Mend(setting, value)


def _context(asked: Question, passes: Callable[[Question], bool]) -> int | None:
    def at(tokens: int) -> bool:
        return passes(replace(asked, workload=replace(asked.workload, prompt_tokens=tokens)))

    return longest_context(at, asked.workload.prompt_tokens - 1)


def _kv_bits(asked: Question, passes: Callable[[Question], bool]) -> int | None:
    now = asked.workload.kv_bits
    fewer = [bits for bits in KV_BITS if bits and (now is None or bits < now)]
    return first_fitting(
        fewer,
        lambda bits: _possible(
            lambda: replace(
                asked, workload=replace(asked.workload, kv_bits=bits, quantized_kv_start=0)
            ),
            passes,
        ),
    )


def _prefill_step(asked: Question, passes: Callable[[Question], bool]) -> int | None:
    smaller = [step for step in PREFILL_STEPS if step < asked.workload.prefill_step]
    return first_fitting(
        smaller,
        lambda step: _possible(
            lambda: replace(asked, workload=replace(asked.workload, prefill_step=step)), passes
        ),
    )


def _quantize(
    asked: Question, bits_per_weight: int, passes: Callable[[Question], bool]
) -> int | None:
    fewer = [bits for bits in reversed(AFFINE_BITS) if bits < bits_per_weight]
    return first_fitting(
        fewer, lambda bits: _possible(lambda: replace(asked, quantize=bits), passes)
    )


def _possible(change: Callable[[], Question], passes: Callable[[Question], bool]) -> bool:
    """Whether a change passes; one that the runtime cannot make does not."""
    try:
        return passes(change())
    except (InputError, UnsupportedError):
        return False
