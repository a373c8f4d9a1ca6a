"""Run an installed program in this process, and write the most that MLX held into a file.

The arguments are the file, the program and its own arguments. A program that does not end is
stopped by SIGTERM, which writes the file too.
"""

import atexit
import importlib
import os
import signal
import sys
from pathlib import Path

import mlx.core as mx

FILE, *COMMAND = sys.argv[1:]


def report() -> None:
    """Write the peak in bytes."""
    Path(FILE).write_text(str(mx.get_peak_memory()))


def stop(*_: object) -> None:
    """Report, and end at once."""
    report()
    os._exit(0)


if __name__ == "__main__":
    atexit.register(report)
    signal.signal(signal.SIGTERM, stop)
    sys.argv = COMMAND
    importlib.import_module(COMMAND[0]).main()
