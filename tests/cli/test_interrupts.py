"""Ctrl-C while memfit is still being imported."""

import subprocess
import sys

import pytest

# Python turns an interrupt in some imports into another error: one of a descriptor's __set_name__
# into a RuntimeError, one while the names of Unicode characters are loaded into a SyntaxError.
STARTING = """
import os, signal, sys
import memfit.cli.__main__ as command
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "memfit.cli.app":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise {error} from None
signal.signal(signal.SIGINT, signal.{handler})
sys.meta_path.insert(0, Interrupted())
sys.argv = ["memfit", "--version"]
command.main()
"""


def started(error: str, handler: str) -> "subprocess.CompletedProcess[str]":
    code = STARTING.format(error=error, handler=handler)
    return subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)


@pytest.mark.parametrize("error", ["RuntimeError", "SyntaxError"])
def test_an_interrupt_of_an_import_ends_with_one_line(error: str) -> None:
    done = started(error, "default_int_handler")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "memfit: interrupted\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    done = started("RuntimeError", "SIG_IGN")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("memfit ")
