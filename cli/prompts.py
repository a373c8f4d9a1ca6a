"""Read the text of a prompt from the command line, a file or standard input."""

import os
import sys
from pathlib import Path

from memfit.estimators.base.errors import InputError

MAX_PROMPT_BYTES = 64_000_000  # more than the longest context of any model


def prompt_file(given: str | None) -> str | None:
    """Return the path in ``@FILE``, None for any other prompt."""
    return str(Path(os.path.expanduser(given[1:]))) if given and given.startswith("@") else None


def prompt_text(given: str) -> str:
    r"""Return the text of ``TEXT``, ``@FILE`` or ``-`` for standard input.

    In TEXT, ``\n`` and ``\t`` mean a line feed and a tab, as in mlx_lm.generate.

    Raises:
        InputError: when it is empty, too long, not UTF-8, or cannot be read.
    """
    if given == "-":
        source, content = "standard input", _piped()
    elif given.startswith("@"):
        source, content = given[1:], _contents(given[1:])
    else:
        given = given.replace("\\n", "\n").replace("\\t", "\t")
        source, content = "--prompt", given.encode("utf-8", "surrogateescape")
    if len(content) > MAX_PROMPT_BYTES:
        raise InputError(f"{source}: the prompt is longer than {MAX_PROMPT_BYTES} bytes")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not UTF-8 text, at byte {error.start}") from None
    if not text.strip():
        raise InputError(f"{source}: the prompt is empty")
    return text


def prompt_list(option: str, given: str) -> tuple[str, ...]:
    """Return the prompts of a file, one on each line, or the text itself.

    A value that starts with ``@``, exists, or has no space is a file.

    Raises:
        InputError: when the file is missing, empty, too large or not UTF-8.
    """
    from memfit.estimators.base.files import printable, read_whole

    name = given.removeprefix("@")
    path = Path(os.path.expanduser(name))
    if given == name and any(map(str.isspace, given)) and not os.path.isfile(path):
        return (given,)
    if given == name and not os.path.lexists(path):
        raise InputError(
            f"{option}: {printable(path)}: no such file; a value without a space is a file of"
            " prompts, one on each line"
        )
    content = read_whole(path, limit=MAX_PROMPT_BYTES)
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{printable(path)}: not UTF-8 text, at byte {error.start}") from None
    if not (prompts := tuple(line for line in lines if line.strip())):
        raise InputError(f"{option}: {printable(path)} has no prompt; write one on each line")
    return prompts


def _contents(name: str) -> bytes:
    from memfit.estimators.base.files import read_whole

    if not name:
        raise InputError("--prompt @: name a file, such as @prompt.txt")
    return read_whole(Path(os.path.expanduser(name)), limit=MAX_PROMPT_BYTES)


def _piped() -> bytes:
    if sys.stdin is None:
        raise InputError("standard input is closed; give the prompt as text or @FILE")
    return sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
