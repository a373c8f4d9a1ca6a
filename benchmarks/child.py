"""Run one case of a benchmark in a process of its own, which may fail or hang."""

import subprocess
import sys


def output_of(
    name: str, module: str, *arguments: str, seconds: float, text: str | None = None
) -> str | None:
    """Return the last line that ``python -m benchmarks.MODULE`` prints, None where it fails.

    ``text`` is its input; on the way a class of mlx-lm may print, too.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    try:
        child = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        reason = str(error.stderr or "timed out")[-160:].strip().replace("\n", " ")
        print(f"{name}: not measured: {reason}", file=sys.stderr, flush=True)
        return None
    return child.stdout.splitlines()[-1]
