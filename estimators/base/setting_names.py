"""The names of settings in messages: keywords in the library, options on the command line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_naming: Callable[[str], str] = str


def setting(name: str) -> str:
    """Return the name of a setting as the users of this process write it.

    >>> setting("kv_bits")
    'kv_bits'
    """
    return _naming(name)


@contextmanager
def named_by(naming: Callable[[str], str]) -> Iterator[None]:
    """Name settings by a function of their keywords."""
    global _naming
    before, _naming = _naming, naming
    try:
        yield
    finally:
        _naming = before
