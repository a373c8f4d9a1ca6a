"""The fixture that runs the command line."""

from tests.cli.conftest import memfit

__all__ = ["memfit"]
