"""Exit codes, and which error becomes which."""

from enum import IntEnum
from typing import TYPE_CHECKING

from memfit.estimators.base.errors import (
    InputError,
    MachineError,
    MemfitError,
    UnreachableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from memfit.estimators.results.terms import Verdict


class Exit(IntEnum):
    """The exit codes of the process; docs/errors.md explains each."""

    YES = 0
    NO = 1
    INPUT = 2
    UNSUPPORTED = 3
    UNREACHABLE = 4
    MACHINE = 5
    BUG = 70
    INTERRUPTED = 130
    TERMINATED = 143


class CommandStopped(Exception):  # noqa: N818 - not an error: the user stopped the command
    """The user stopped a command; the message says what is saved."""

    def __init__(self, message: str, code: Exit) -> None:
        """Take the message, and the exit code for the signal."""
        super().__init__(message)
        self.code = code


_BY_ERROR: dict[type[MemfitError], Exit] = {
    InputError: Exit.INPUT,
    UnsupportedError: Exit.UNSUPPORTED,
    UnreachableError: Exit.UNREACHABLE,
    MachineError: Exit.MACHINE,
}


def exit_of(error: MemfitError) -> Exit:
    """Return the exit code of an error: that of its nearest base class with a code.

    >>> exit_of(UnsupportedError("?")).name
    'UNSUPPORTED'
    """
    return next(_BY_ERROR[cls] for cls in type(error).__mro__ if cls in _BY_ERROR)


def exit_of_verdict(verdict: "Verdict", *, is_requested: bool = False) -> Exit:
    """Return the exit code of a verdict; an unknown one that was requested is not decided.

    >>> exit_of_verdict("tight").name, exit_of_verdict("does_not_load").name
    ('YES', 'UNSUPPORTED')
    >>> exit_of_verdict("unknown").name, exit_of_verdict("unknown", is_requested=True).name
    ('YES', 'UNSUPPORTED')
    """
    if verdict == "does_not_load" or (verdict == "unknown" and is_requested):
        return Exit.UNSUPPORTED
    return Exit.NO if verdict == "exceeds" else Exit.YES
