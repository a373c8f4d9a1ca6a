"""Formats of output, where it goes, and what a terminal or a page must not interpret."""

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TextIO

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import write_atomically

Format = Literal["table", "json", "yaml", "csv", "markdown", "html", "svg", "github", "junit"]
"""Each is written by the module of that name in ``cli/render/writers``, tables by ``terminal``."""

DRAWN: tuple[Format, ...] = ("html", "svg")
"""The formats that show charts without being asked for them."""
_SUFFIXES: dict[str, Format] = {
    ".txt": "table",
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".md": "markdown",
    ".csv": "csv",
    ".html": "html",
    ".svg": "svg",
    ".xml": "junit",
}

_ONE = re.compile(
    r"(?<![\w.,:/-])1 (token|request|client|prompt|image|layer|expert|row|model|file|step|chunk"
    r"|conversation|turn|session|rank|machine|sequence|slot|block|buffer|call|group|run|sample"
    r"|target|limit|measurement|adapter|parameter|byte|second|minute|day|other)s\b(?!/)"
)
"""One of what a sentence counts, in the plural."""


def format_of(path: Path, offered: Sequence[Format]) -> Format:
    """Return the format of a file by its suffix.

    Raises:
        InputError: when none of those that a command offers has it.
    """
    format_ = _SUFFIXES.get(path.suffix.lower())
    if format_ is None or format_ not in offered:
        known = ", ".join(suffix for suffix, form in _SUFFIXES.items() if form in offered)
        raise InputError(f"{path}: no format has this suffix; use {known}, or --format")
    return format_


def deliver(view: Any, form: Format, output: Path | None) -> None:
    """Write a result in a format to a file, else to standard output.

    Raises:
        InputError: when the file cannot be written.
    """
    emit(rendered(view, form, to_file=output is not None), output)


def rendered(view: Any, form: Format, *, to_file: bool) -> str:
    """Return a result in a format."""
    return str(writer_of(form).write(view, to_file=to_file))


def writer_of(form: Format) -> Any:
    """Import and return the writer of a format; ``table`` is for the terminal."""
    return import_module(f"memfit.cli.render.writers.{'terminal' if form == 'table' else form}")


def emit(text: str, output: Path | None) -> None:
    """Write a rendered text to a file, else to standard output.

    Raises:
        InputError: when the file cannot be written.
    """
    if output is not None:
        write_whole(output, text)
    else:
        _write_out(text)


def require_writable(output: Path | None, *, needs_stdout: bool = False) -> None:
    """Check that a result can be written, before work that takes long.

    Raises:
        InputError: when it cannot be written.
    """
    if (output is None or needs_stdout) and sys.__stdout__ is None:
        raise InputError("standard output is closed; name a file with -o")
    if output is None:
        return
    path = _resolved(output)
    if _is_device(path):
        return
    import tempfile

    try:
        with suppress(FileNotFoundError):
            path.lstat()  # a name may be too long for the file system
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _write_out(text: str) -> None:
    try:
        sys.stdout.write(encodable(text, sys.stdout.encoding))
        sys.stdout.flush()
    except OSError as error:
        discard_stream(sys.stdout)
        raise InputError(f"standard output: cannot be written: {error.strerror}") from None


def discard_stream(stream: TextIO) -> None:
    """Drop the buffer of a stream that failed: Python would try to flush it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def encodable(text: str, encoding: str) -> str:
    r"""Return a text with JSON escapes for characters that an encoding lacks.

    >>> print(encodable("héllo", "ascii"))
    h\u00e9llo
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text)
    return text


def write_whole(path: Path, text: str) -> None:
    """Write a file through a temporary one in its directory, so that it is never incomplete.

    A symbolic link stays a link. A device or a pipe such as /dev/stdout is written directly.

    Raises:
        InputError: when the directory or the file cannot be written.
    """
    path = _resolved(path)
    content = text.encode("utf-8", "backslashreplace")  # a path may hold bytes that are no text
    try:
        if _is_device(path):
            path.write_bytes(content)
        else:
            write_atomically(path, content, mode=_mode(path), durable=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _resolved(path: Path) -> Path:
    """The target of a symbolic link, else the path itself."""
    path = Path(os.path.realpath(path))
    if os.path.isdir(path):
        raise InputError(f"{path}: is a directory; give a file name in it")
    return path


def _is_device(path: Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def _mode(path: Path) -> int:
    """The permissions that a plain write would give: the existing file's, else by the umask."""
    if path.exists():
        return path.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def visible(text: str) -> str:
    r"""Return a text as it is printed, with escape sequences for marks that nobody sees.

    These are control characters, marks of direction, and "##[": it starts a command to GitHub's
    runner, which reads all that a job prints. What is counted is singular where there is one.

    >>> visible("a\x1b[1m b\u202e"), visible("1 tokens, 11 requests")
    ('a\\x1b[1m b\\u202e', '1 token, 11 requests')
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return _ONE.sub(r"1 \1", text).replace("##[", r"##\x5b")


def message(text: str) -> str:
    """Return a message for standard error, in one line."""
    return f"memfit: {visible(' '.join(text.split()))}"


def say(text: str) -> None:
    """Write a message to standard error."""
    print(message(text), file=sys.stderr)
