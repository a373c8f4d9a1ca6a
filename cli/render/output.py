"""Where a rendered result goes: standard output, or a file that is whole or not there."""

import os
import sys
import tempfile
from pathlib import Path

from memfit.cli.options import Format
from memfit.estimators.errors import InputError
from memfit.estimators.result import CurvePoint, Estimate
from memfit.estimators.units import Units


def deliver(
    result: Estimate,
    form: Format,
    *,
    output: Path | None,
    units: Units,
    curve: tuple[CurvePoint, ...],
    explanation: tuple[str, ...],
) -> None:
    """Render a result and write it out.

    Raises:
        InputError: when the file cannot be written.
    """
    if form is Format.JSON:
        from memfit.cli.render.data import to_json

        text = to_json(result, curve, explanation)
    elif form is Format.YAML:
        from memfit.cli.render.data import to_yaml

        text = to_yaml(result, curve, explanation)
    elif form is Format.MARKDOWN:
        from memfit.cli.render.markdown import to_markdown

        text = to_markdown(result, units, curve, explanation)
    else:
        from memfit.cli.render.table import to_table

        text = to_table(result, units, curve, explanation, to_file=output is not None)
    emit(text, output)


def emit(text: str, output: Path | None) -> None:
    """Write a rendered text to a file, else to standard output.

    Raises:
        InputError: when the file cannot be written.
    """
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_whole(output, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file by way of a temporary one beside it, so that it is never half there.

    Raises:
        InputError: when the directory or the file cannot be written.
    """
    try:
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


def _mode(path: Path) -> int:
    """The permissions a plain write would leave: those of the file there is, else the umask's."""
    if path.exists():
        return path.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
