"""The command line of another program that a result answers for."""

from msgspec import Struct


class ProgramLine(Struct, frozen=True, kw_only=True):
    """A command line as it was given, and how it was read."""

    program: str
    line: str
    ignored: tuple[str, ...]
    """Its flags that change no memory."""
    notes: tuple[str, ...]
    """What the program does where the line says nothing, and what is not counted."""
