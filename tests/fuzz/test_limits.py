"""The worst inputs within the limits: at most 64 MB above the input.

Times, and the inputs that are slow to trace, are benchmarks/fuzz/worst_inputs.py's.
"""

import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.readers import READERS, outcome
from tests.fuzz.worst import WORST

MAX_EXTRA_BYTES = 64_000_000
SLOW = {
    "as many measurements as there may be",
    "as many names as there may be",
    "as many strings as there may be",
    "as many tensors as there may be",
}


@pytest.mark.parametrize("case", sorted(WORST.keys() - SLOW))
def test_worst_inputs_stay_within_64_megabytes(case: str, tmp_path: Path) -> None:
    name, make = WORST[case]
    content = make()
    # The reader's bytes are the input; these are only their source.
    inputs = 0 if name == "gguf" else len(content)
    tracemalloc.start()
    try:
        outcome(READERS[name], content, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - inputs <= MAX_EXTRA_BYTES
