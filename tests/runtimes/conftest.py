"""The command line, as in the tests of commands."""

from tests.cli.conftest import memfit

__all__ = ["memfit"]
