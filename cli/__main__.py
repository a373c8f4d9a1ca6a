"""The process of the command line: what a process of its own may set, before anything else."""

import atexit
import gc
import sys


def main() -> None:
    """Run the command line and exit."""
    # In a short process collections free nothing and cost a fifteenth of the time; the last one
    # would go through every object there is, to free what ends anyway.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    try:
        from memfit.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
