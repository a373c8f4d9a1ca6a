"""Complete dispatch over a closed set of types."""

from typing import NoReturn


def assert_never(value: NoReturn) -> NoReturn:
    """Close a ``match`` that handles every type; mypy reports one that is not handled.

    Python's own is in `typing` from 3.11 on.
    """
    raise AssertionError(f"not handled: {value!r}")
