"""Strict JSON: what a file may hold, and where a value is in it."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.files import printable

MAX_NESTING = 64  # configs in use nest five or six levels
MAX_INTEGER_BITS = 128  # room to show 10^30 as what it is, and nothing that takes pages
_DIGIT_WINDOW = 512
_DIGIT_STRIDE = 4096


class RepeatedNameError(Exception):
    """An object names a key twice; readers differ in which value they keep."""


def parse_object(
    text: bytes, path: PurePath, *, what: str, error: type[MemfitError], max_values: int
) -> dict[str, Any]:
    """Return the JSON object that ``text`` holds; ``what`` names it in messages.

    Raises:
        MemfitError: of the class ``error``, when the text is not one JSON object in UTF-8, has
            more than ``max_values`` values, a repeated name, an endless number or no floor.
    """
    place = f"{printable(path)}: {what}"
    reject_oversized(text, place, error=error, max_values=max_values)
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique_members)
    except UnicodeDecodeError as cause:
        raise error(f"{place} is not UTF-8 at byte {cause.start}") from None
    except json.JSONDecodeError as cause:
        raise error(f"{place} is not JSON at character {cause.pos}: {cause.msg}") from None
    except RepeatedNameError as cause:
        raise error(f"{place} has the name '{printable(cause)}' twice") from None
    except ValueError:
        raise error(f"{place} has a number of thousands of digits") from None
    except RecursionError:
        raise error(f"{place} is nested too deeply") from None
    if not isinstance(value, dict):
        raise error(f"{place} is not a JSON object")
    if b"\\ud" in text.lower():  # half of a surrogate pair cannot be printed, nor written again
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            plain(value, printable(path), error=error)  # names the place
    return value


def reject_oversized(text: bytes, place: str, *, error: type[MemfitError], max_values: int) -> None:
    """Raise ``error`` for a text of more than ``max_values`` values, or with an endless number.

    To be called before parsing, because two bytes of text can become seventy of memory.
    """
    if text.count(b",") + text.count(b"[") + text.count(b"{") > max_values:
        raise error(f"{place} has more than {max_values} values")
    if _has_endless_number(text):
        raise error(f"{place} has a number of thousands of digits")


def plain(value: Any, where: str, *, error: type[MemfitError], depth: int = 0) -> Any:
    """Return a copy of ``value``, made of nothing but what JSON can say.

    An infinite number becomes ``{"__float__": "Infinity"}``, as newer transformers write it.

    Raises:
        MemfitError: of the class ``error``, naming the path of a value that is NaN, of another
            type, too large an integer, not Unicode, or nested beyond ``MAX_NESTING``.
    """
    if depth > MAX_NESTING:
        raise error(f"{where}: nested deeper than {MAX_NESTING} levels")
    if isinstance(value, dict):
        joint = "." if depth else ": "
        return {
            _text(key, where, error): plain(
                item, f"{where}{joint}{printable(key)}", error=error, depth=depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            plain(item, f"{where}[{index}]", error=error, depth=depth + 1)
            for index, item in enumerate(value)
        ]
    return _scalar(value, where, error)


def _scalar(value: Any, where: str, error: type[MemfitError]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return _finite(value, where, error)
    if not isinstance(value, int):
        return _text(value, where, error)
    if value.bit_length() > MAX_INTEGER_BITS:
        raise error(f"{where}: an integer of {value.bit_length()} bits is too large")
    return value


def _finite(value: float, where: str, error: type[MemfitError]) -> Any:
    if math.isnan(value):
        raise error(f"{where}: expected a number, got NaN")
    if math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def _text(value: Any, where: str, error: type[MemfitError]) -> str:
    if not isinstance(value, str):
        raise error(f"{where}: {printable(value)} is a {type(value).__name__}; put it in quotes")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{where}: '{printable(value)}' is not valid Unicode") from None
    return value


def unique_members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's members; raises RepeatedNameError when a name repeats."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise RepeatedNameError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return values


def _has_endless_number(text: bytes) -> bool:
    # Before Python 3.10.7 int() takes a time that grows with the square of the digits.
    return any(
        text[start : start + _DIGIT_WINDOW].isdigit()
        for start in range(0, len(text) - _DIGIT_WINDOW, _DIGIT_STRIDE)
    )


# How a value is reached from the top: names of mappings and indices of sequences.
Place = tuple[str | int, ...]


def key_path(place: Place) -> str:
    """Return a place as messages name it.

    >>> key_path(("runs", 0, "kv_bytes"))
    'runs[0].kv_bytes'
    """
    steps = (f"[{step}]" if isinstance(step, int) else f".{printable(step)}" for step in place)
    return "".join(steps).removeprefix(".")
