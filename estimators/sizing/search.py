"""The longest context, the largest prefill step and the widest KV cache that fit."""

from collections.abc import Callable, Iterable
from typing import TypeVar

CONTEXT_STEP = 256
PREFILL_STEPS = (2048, 1024, 512, 256, 128)
KV_BITS = (None, 8, 4)

Setting = TypeVar("Setting")


def longest_context(fits: Callable[[int], bool], most: int) -> int | None:
    """Return the largest multiple of 256 up to ``most`` for which ``fits`` holds, else None.

    ``fits`` must not turn true again once it has turned false.

    >>> longest_context(lambda tokens: tokens <= 1000, 4096)
    768
    """
    low, high = 0, most // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * CONTEXT_STEP):
            low = middle
        else:
            high = middle - 1
    return low * CONTEXT_STEP or None


def first_fitting(settings: Iterable[Setting], fits: Callable[[Setting], bool]) -> Setting | None:
    """Return the first setting that fits, else None."""
    return next((setting for setting in settings if fits(setting)), None)
