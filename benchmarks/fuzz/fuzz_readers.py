"""Fuzz one reader with atheris: unexpected exceptions and slow or memory-hungry inputs end it.

    python -m venv /tmp/fuzz && /tmp/fuzz/bin/pip install atheris -e .
    /tmp/fuzz/bin/python benchmarks/fuzz/fuzz_readers.py gguf -max_total_time=300

The first argument names a reader of tests/fuzz/readers.py, the others are libFuzzer's. atheris
needs Linux and Python 3.11 or 3.12. docs/reliability.md sums up the runs.
"""

import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))
with atheris.instrument_imports(include=["memfit"]):
    from tests.fuzz.readers import READERS, outcome

MAX_SECONDS = 2.0
MAX_EXTRA_BYTES = 64_000_000
_TRACED_EVERY = 200  # tracing memory makes a run several times slower


def main() -> None:
    """Fuzz the reader that the first argument names."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in READERS:
        sys.exit(f"usage: fuzz_readers.py READER [libFuzzer's options]; {', '.join(READERS)}")
    reader = READERS[name]
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    corpus = Path(tempfile.mkdtemp())
    (corpus / "seed").write_bytes(reader.seed)
    runs = 0

    def run(content: bytes) -> None:
        nonlocal runs
        runs += 1
        traced = runs % _TRACED_EVERY == 0
        if traced:
            tracemalloc.start()
        started = time.monotonic()
        error = outcome(reader, content, directory)
        seconds = time.monotonic() - started
        if traced:
            extra = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if extra > MAX_EXTRA_BYTES:
                raise AssertionError(f"{extra} bytes above the input")
        elif seconds > MAX_SECONDS:
            raise AssertionError(f"{seconds:.1f} s")
        if error is not None and not error.isprintable():
            raise AssertionError(f"not one printable line: {error!r}")

    atheris.Setup([sys.argv[0], *sys.argv[1:], str(corpus)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
