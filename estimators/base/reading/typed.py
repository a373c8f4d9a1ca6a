"""Typed conversion: a mapping becomes a record when every field is there, of its declared type."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import repeat
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.reading.place import Place
from memfit.estimators.base.reading.section import Reading
from memfit.estimators.base.reading.values import as_list, as_object, one_of

Record = TypeVar("Record")
# How a value that holds no others is read, by its declared type.
Parsers = Mapping[Any, Callable[[Any], Any]]


def to_record(
    kind: type[Record], value: Any, reading: Reading, parsers: Parsers, place: Place = ()
) -> Record:
    """Convert a mapping to a record; its keys must be exactly the fields.

    Raises:
        MemfitError: of the reading's class, for the first field that is unknown, missing or wrong.
    """
    values = _parsed(as_object, value, reading, place)
    declared: Any = kind
    types = _field_types(declared)
    if unknown := [key for key in values if key not in types]:
        raise reading.fail((*place, unknown[0]), f"unknown key in a {kind.__name__.lower()}")
    if missing := [name for name in types if name not in values]:
        raise reading.fail((*place, missing[0]), "missing")
    read = {
        name: _value(declared, values[name], reading, parsers, (*place, name))
        for name, declared in types.items()
    }
    try:
        return kind(**read)
    except InputError as error:
        raise reading.fail(place, str(error)) from None


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """The declared type of each field of a record or a named tuple."""
    hints = get_type_hints(kind)
    names = kind._fields if hasattr(kind, "_fields") else kind.__struct_fields__
    return {name: hints[name] for name in names}


@cache
def _shape(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _value(kind: Any, value: Any, reading: Reading, parsers: Parsers, place: Place) -> Any:
    """Convert a value to the declared type of its field."""
    if parse := parsers.get(kind):
        return _parsed(parse, value, reading, place)
    if hasattr(kind, "__struct_fields__"):
        return to_record(kind, value, reading, parsers, place)
    origin, arguments = _shape(kind)
    if origin is Literal:
        return _parsed(one_of(arguments), value, reading, place)
    if origin is Mapping:
        named = _parsed(as_object, value, reading, place)
        return {
            key: _value(arguments[1], item, reading, parsers, (*place, key))
            for key, item in named.items()
        }
    if origin is tuple:
        return tuple(_items(repeat(arguments[0]), value, reading, parsers, place))
    if hasattr(kind, "_fields"):
        types = _field_types(kind)
        if not isinstance(value, list) or len(value) != len(types):
            raise reading.fail(place, f"expected a list of {', '.join(types)}, got {short(value)}")
        return kind(*_items(types.values(), value, reading, parsers, place))
    # What is left is a type or None.
    return None if value is None else _value(arguments[0], value, reading, parsers, place)


def _items(
    kinds: Iterable[Any], value: Any, reading: Reading, parsers: Parsers, place: Place
) -> Iterator[Any]:
    """Convert the items of a list."""
    items = _parsed(as_list, value, reading, place)
    for index, (kind, item) in enumerate(zip(kinds, items, strict=False)):
        yield _value(kind, item, reading, parsers, (*place, index))


def _parsed(parse: Callable[[Any], Any], value: Any, reading: Reading, place: Place) -> Any:
    try:
        return parse(value)
    except InputError as error:
        raise reading.fail(place, str(error)) from None
