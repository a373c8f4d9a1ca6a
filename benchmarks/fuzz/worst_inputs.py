"""Time and memory of each reader on the worst input within its limits.

    python benchmarks/fuzz/worst_inputs.py

Each runs in a separate process; its highest resident memory (Linux's VmHWM) is measured, and the
input itself is subtracted once.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fuzz.readers import READERS, outcome
from tests.fuzz.worst import WORST


def main() -> None:
    """Run every case, or the named one on the given file."""
    if len(sys.argv) == 3:
        _measure(sys.argv[1], Path(sys.argv[2]))
        return
    print("| reader | worst input | MB | seconds | MB above it | answer |")
    print("|---|---|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "input"
        for case, (_, make) in WORST.items():
            path.write_bytes(make())
            subprocess.run([sys.executable, __file__, case, str(path)], check=True)


def _measure(case: str, path: Path) -> None:
    name, _ = WORST[case]
    content = path.read_bytes()
    before, started = _highest_bytes(), time.monotonic()
    # Readers that take a path get one; they read the input themselves.
    error = outcome(READERS[name], content, path.parent)
    seconds, extra = time.monotonic() - started, _highest_bytes() - before
    inputs = 0 if name == "gguf" else len(content)
    size, above = len(content) / 1e6, max(0, extra - inputs) / 1e6
    answer = "rejected" if error else "read"
    print(f"| {name} | {case} | {size:.1f} | {seconds:.2f} | {above:.0f} | {answer} |")


def _highest_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell a process's highest memory")


if __name__ == "__main__":
    main()
