"""Python's search for unreachable cycles, paused while a trace runs: its objects have none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_collecting() -> Iterator[None]:
    """Collect no cycles inside the block: a search takes as long as recording the graph."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
