"""Typed conversion: a mapping becomes a record when every field has its type and range."""

import re
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.reading.place import Place
from memfit.estimators.base.reading.section import Reading

Record = TypeVar("Record", bound=Struct)
# msgspec's messages: "Expected `int` >= 0 - at `$.runs[0].kv_bytes`".
_MESSAGE = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\].*")
_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
}
_TYPE = re.compile(rf"\b({'|'.join(_NAMES)})\b")
_KEY = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


def to_record(kind: type[Record], value: Any, reading: Reading, place: Place = ()) -> Record:
    """Convert a mapping to a record; a type with a tag needs it in the mapping.

    Raises:
        MemfitError: of the reading's class, for the first field that is unknown, missing or wrong.
    """
    tag_field, tag = kind.__struct_config__.tag_field, kind.__struct_config__.tag
    if tag_field is not None and reading.section(value, place).values.get(tag_field) != tag:
        raise reading.fail((*place, tag_field), f"expected {tag}")
    try:
        return convert(value, kind)
    except ValidationError as error:
        steps, text = _located(str(error), value)
        raise reading.fail((*place, *steps), text) from None
    except InputError as error:  # of the record's own check
        raise reading.fail(place, str(error)) from None


def _located(message: str, value: Any) -> tuple[Place, str]:
    """Return where a message of msgspec is about, and what it says with the value that is there."""
    text, path = _MESSAGE.fullmatch(message).groups()  # type: ignore[union-attr]
    place: Place = ()
    for step in _STEP.finditer(path or ""):
        if step.lastindex is None:  # into a mapping: msgspec does not name the key
            break
        place += (step[1] or int(step[2]),)
        value = value[place[-1]]
    if key := _KEY.fullmatch(text):
        return (*place, key[2]), "missing" if key[1].startswith("missing") else "unknown key"
    if text.startswith("Invalid"):
        return place, f"{short(value)} is not one of the values it can have"
    text, _, _ = text.partition(", got `")
    named = _TYPE.sub(lambda name: _NAMES[name[0]], text.replace("`", ""))
    return place, f"{named[0].lower()}{named[1:]}, got {short(value)}"
