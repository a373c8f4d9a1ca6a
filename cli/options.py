"""Options that several commands share, and their texts made into values."""

from collections.abc import Callable
from enum import Enum
from typing import Annotated, TypeVar

import typer

from memfit.estimators.errors import InputError

Value = TypeVar("Value")


class Format(str, Enum):
    """How a result is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    MARKDOWN = "markdown"


class Method(str, Enum):
    """How figures are come by; the trace and the measurement are not built yet."""

    AUTO = "auto"
    FORMULA = "formula"


def parsed(option: str, parse: Callable[[str], Value], text: str | None) -> Value | None:
    """Return the value of an option's text, None when it was not given.

    Raises:
        InputError: naming the option, when the text cannot be read.
    """
    if text is None:
        return None
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


Json = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
