"""The options of llama.cpp's programs, from the help of its own parser in xllamacpp.

``python -m tests.programs.llama_help 12`` prints the help of llama-server (common/common.h,
LLAMA_EXAMPLE_SERVER of build b11549), ``5`` that of llama-cli. It runs in a process of its own: the
parser writes to the C library's standard output, and ends the process.
"""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = {"llama-server": 12, "llama-cli": 5}
_OBJECT_HEAD = 16
"""Bytes in front of the parameters in a Python object without a table of methods."""


def rows(program: str) -> list[str]:
    """Return a row for each option, as a program's table has it."""
    command = [sys.executable, "-m", __name__, str(EXAMPLES[program])]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[tuple[list[str], str]] = []
    for line in text.splitlines():
        if variable := re.fullmatch(r"\s+\(env: (\w+)\)", line):
            names, _ = found[-1]
            names += [name for name in [f"${variable[1]}"] if name not in names]
        elif re.match(r"--?[A-Za-z]", line):
            found.append(_option(line))
    return [" ".join([*names, arity]).strip() for names, arity in found]


def _option(line: str) -> tuple[list[str], str]:
    """The names of an option, and whether it has values; its text begins at column 40."""
    rest = (line[:40] if line[39:40] == " " else line).strip()
    names = []
    while match := re.match(r"(--?[A-Za-z][\w.-]*)(,\s*|\s+|$)", rest):
        names.append(match[1])
        rest = rest[match.end() :]
    if not rest:
        return names, ""
    return names, "=2" if rest == "START END" else "="


def _print_help(example: int) -> None:
    import xllamacpp

    (path,) = Path(xllamacpp.__file__).parent.glob("xllamacpp.*.so")
    parse = ctypes.CDLL(str(path))[
        "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
    ]
    params = xllamacpp.CommonParams()
    words = (ctypes.c_char_p * 3)(b"llama-server", b"--help")
    parse(2, words, ctypes.c_void_p(id(params) + _OBJECT_HEAD), example, None)


if __name__ == "__main__":
    _print_help(int(sys.argv[1]))
