"""Start the command line: settings for the whole process, before anything is imported."""

import atexit
import gc
import sys


def main() -> None:
    """Run the command line and exit."""
    # In a short process garbage collections free nothing and take 7 % of the time. freeze avoids
    # the collection at exit, which would visit every object.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    try:
        from memfit.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
