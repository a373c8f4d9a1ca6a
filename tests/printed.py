"""Printed commands, read by the argument parsers of the programs that they call."""

import argparse
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest

PROGRAMS = {
    "mlx_lm.convert": ("mlx_lm.convert", "main"),
    "mlx_lm.generate": ("mlx_lm.generate", "main"),
    "mlx_lm.server": ("mlx_lm.server", "main"),
    "mlx_lm.lora": ("mlx_lm.lora", "main"),
    "mlx_vlm.convert": ("mlx_vlm.convert", "main"),
    "mlx_vlm.generate": ("mlx_vlm.generate", "main"),
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

        A flag that it does not have, or a value that it refuses, fails the test.
        """
        program, *arguments = shlex.split(command)
        if program not in self._parsers:
            self._parsers[program] = _parser(program)
        try:
            return vars(self._parsers[program].parse_args(arguments))
        except SystemExit:
            pytest.fail(f"{program} does not accept: {command}")


def _llama_server() -> argparse.ArgumentParser:
    """The flags of llama-server that memfit prints (llama.cpp b11549, common/arg.cpp).

    Layers are all on the GPU by default, and the cache is in 16 bits (common/common.h).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-c", "--ctx-size", type=int, default=0)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-b", "--batch-size", type=int, default=2048)
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    parser.add_argument("-ctk", "--cache-type-k", default="f16")
    parser.add_argument("-ctv", "--cache-type-v", default="f16")
    parser.add_argument("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto")
    parser.add_argument("-kvu", "--kv-unified", action="store_true")
    parser.add_argument("--swa-full", action="store_true")
    parser.add_argument("-ngl", "--gpu-layers", default="all")
    parser.add_argument("-ncmoe", "--n-cpu-moe", type=int, default=0)
    return parser


def _parser(program: str) -> argparse.ArgumentParser:
    if program == "llama-server":
        return _llama_server()
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
