"""Start and end the command line: settings for the whole process, before anything is imported."""

import atexit
import gc
import os
import signal
import sys


class _End:
    """The last exit function: leaves at once, as freeing every object takes several ms."""

    code = 1
    """Unless the command line says otherwise: an exception that Python has printed."""

    def __call__(self) -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # Python reports it
        os._exit(self.code)


def _leave_at_once(*_: object) -> None:
    os.write(2, b"memfit: interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line and end the process."""
    # Python would print a traceback of what the interrupt came into.
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, _leave_at_once)
    # In a short process garbage collections free nothing and take up to a fifth of the time.
    gc.disable()
    end = _End()
    atexit.register(end)  # before those of any module of the command, so that it runs after them
    try:
        from memfit.cli.app import main as run

        if is_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
        end.code = 0
    except KeyboardInterrupt:
        end.code = 130
        sys.exit(end.code)
    except SystemExit as left:
        end.code = int(left.code or 0)
        raise


if __name__ == "__main__":
    main()
