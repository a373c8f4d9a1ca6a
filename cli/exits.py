"""Exit codes, and which error becomes which."""

from enum import IntEnum

from memfit.estimators.errors import (
    InputError,
    MachineError,
    MemfitError,
    UnreachableError,
    UnsupportedError,
)


class Exit(IntEnum):
    """What the process says of itself; docs/errors.md explains each."""

    YES = 0
    NO = 1
    INPUT = 2
    UNSUPPORTED = 3
    UNREACHABLE = 4
    MACHINE = 5
    BUG = 70
    INTERRUPTED = 130
    TERMINATED = 143


_BY_ERROR: dict[type[MemfitError], Exit] = {
    InputError: Exit.INPUT,
    UnsupportedError: Exit.UNSUPPORTED,
    UnreachableError: Exit.UNREACHABLE,
    MachineError: Exit.MACHINE,
}


def exit_of(error: MemfitError) -> Exit:
    """Return the exit code of an error, by the nearest class that has one.

    >>> exit_of(UnsupportedError("?")).name
    'UNSUPPORTED'
    """
    return next(_BY_ERROR[cls] for cls in type(error).__mro__ if cls in _BY_ERROR)
