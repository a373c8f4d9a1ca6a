"""A call of a runner's method in a measuring process: how arguments and answers cross, as JSON.

Both sides read the types from the annotations of the method.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

from msgspec import convert, to_builtins


def encoded(value: Any) -> Any:
    """Return a value as JSON can hold it; a path is absolute, for a process in any directory."""
    return to_builtins(value, enc_hook=_path_text)


def decoded(value: Any, kind: Any) -> Any:
    """Return the value of a type that `encoded` made this of."""
    return convert(value, kind, dec_hook=lambda known, text: known(text))


def bound(method: Callable[..., Any], *arguments: Any, **named: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names, without ``self``."""
    _, *given = signature(method).bind(None, *arguments, **named).arguments.items()
    return dict(given)


def arguments_of(method: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `encoded` made these of."""
    kinds = get_type_hints(method)
    return {name: decoded(value, kinds[name]) for name, value in given.items()}


def answer_of(method: Callable[..., Any], answer: Any) -> Any:
    """Return the answer that `encoded` made this of."""
    return decoded(answer, get_type_hints(method)["return"])


def _path_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value.absolute())
    raise NotImplementedError(type(value))
