"""Where a rendered result goes: standard output, or a file that is whole or not there."""

import json
import os
import sys
from pathlib import Path
from typing import TextIO

from memfit.cli.options import Format
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units
from memfit.estimators.results.estimate import Estimate, Plots


def deliver(
    result: Estimate,
    form: Format,
    *,
    output: Path | None,
    units: Units,
    plots: Plots | None,
    explanation: tuple[str, ...],
) -> None:
    """Render a result and write it out.

    Raises:
        InputError: when the file cannot be written.
    """
    if form is Format.JSON:
        from memfit.cli.render.data import to_json

        text = to_json(result, plots, explanation)
    elif form is Format.YAML:
        from memfit.cli.render.data import to_yaml

        text = to_yaml(result, plots, explanation)
    elif form is Format.MARKDOWN:
        from memfit.cli.render.markdown import to_markdown

        text = to_markdown(result, units, plots, explanation)
    else:
        from memfit.cli.render.table import to_table

        text = to_table(result, units, plots, explanation, to_file=output is not None)
    emit(text, output)


def emit(text: str, output: Path | None) -> None:
    """Write a rendered text to a file, else to standard output.

    Raises:
        InputError: when the file cannot be written.
    """
    if output is not None:
        write_whole(output, text)
    else:
        _write_out(_standard_output(), text)


def require_writable(output: Path | None, *, needs_stdout: bool = False) -> None:
    """Hold where a result is to go against what can be written, before work that takes long.

    Raises:
        InputError: when it cannot be.
    """
    if output is None or needs_stdout:
        _standard_output()
    if output is None:
        return
    path = _place(output)
    if path.exists() and not path.is_file():
        return
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _standard_output() -> TextIO:
    # Python's own type does not tell that it is None where it was closed.
    stream: TextIO | None = sys.stdout
    if stream is None:
        raise InputError("standard output is closed; name a file with -o")
    return stream


def _write_out(stream: TextIO, text: str) -> None:
    try:
        stream.write(encodable(text, stream.encoding))
        stream.flush()
    except OSError as error:
        let_go(stream)
        if isinstance(error, BrokenPipeError):
            return  # the reader went away: the exit code is for whoever still asks
        raise InputError(f"standard output: cannot be written: {error.strerror}") from None


def let_go(stream: TextIO) -> None:
    """Lose what is left in the buffer of a stream that failed, and would again as Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def encodable(text: str, encoding: str) -> str:
    r"""Return a text with JSON's escapes in place of what an encoding does not have.

    >>> print(encodable("héllo", "ascii"))
    h\u00e9llo
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text)
    return text


def write_whole(path: Path, text: str) -> None:
    """Write a file by way of a temporary one beside it, so that it is never half there.

    A link stays one; a device or a pipe such as /dev/stdout is written to, and not replaced.

    Raises:
        InputError: when the directory or the file cannot be written.
    """
    path = _place(path)
    import tempfile  # an answer on the terminal needs none

    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, _mode(path))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _place(path: Path) -> Path:
    """Where a file really is, when it is a link."""
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file in it")
    return path


def _mode(path: Path) -> int:
    """The permissions a plain write would leave: those of the file there is, else the umask's."""
    if path.exists():
        return path.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
