"""Printed commands, read by the argument parsers of the programs that they call."""

import argparse
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest

from memfit.estimators.questions.programs.reading import read_line

PROGRAMS = {
    "mlx_lm.convert": ("mlx_lm.convert", "main"),
    "mlx_lm.generate": ("mlx_lm.generate", "main"),
    "mlx_lm.server": ("mlx_lm.server", "main"),
    "mlx_lm.lora": ("mlx_lm.lora", "main"),
    "mlx_vlm.convert": ("mlx_vlm.convert", "main"),
    "mlx_vlm.generate": ("mlx_vlm.generate", "main"),
    "mlx_vlm.server": ("mlx_vlm.server.cli", "main"),
}
"""The modules whose ``main`` makes the parser of a program."""


class _Parsed(BaseException):
    """Ends a program once its parser is there; no program catches it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class Parsers:
    """The parsers of the programs, each made once."""

    def __init__(self) -> None:
        self._parsers: dict[str, argparse.ArgumentParser] = {}

    def options(self, command: str) -> dict[str, Any]:
        """Return what the program reads from a command, with its own defaults.

        Of llama-server they are the settings that memfit itself reads from a pasted line.
        A flag that it does not have, or a value that it refuses, fails the test.
        """
        program, *arguments = shlex.split(command)
        if program == "llama-server":
            return read_line(command).settings
        if program not in self._parsers:
            self._parsers[program] = parser_of(program)
        try:
            return vars(self._parsers[program].parse_args(arguments))
        except SystemExit:
            pytest.fail(f"{program} does not accept: {command}")


def parser_of(program: str) -> argparse.ArgumentParser:
    """Return the parser that a program of mlx-lm or mlx-vlm makes."""
    module, function = PROGRAMS[program]
    pytest.importorskip(module.partition(".")[0])
    main: Callable[[], None] = getattr(import_module(module), function)

    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Parsed(self)

    with patch.object(argparse.ArgumentParser, "parse_args", stop), patch.object(sys, "argv", [""]):
        try:
            main()
        except _Parsed as found:
            return found.parser
    raise AssertionError(f"{program} made no parser")
