"""Python's search for unreachable cycles, kept from a trace that has none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_collecting() -> Iterator[None]:
    """Collect no cycles inside the block: searching a graph takes as long as making it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
