"""Start the command line: settings for the whole process, before anything is imported."""

import atexit
import gc
import sys


def main() -> None:
    """Run the command line and exit."""
    # In a short process garbage collections free nothing and take up to a fifth of the time. freeze
    # avoids the collection at exit, which would visit every object.
    gc.disable()
    atexit.register(gc.freeze)
    try:
        from memfit.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
