"""Measurements as JSON: a file with one, or a collection for export to another machine.

The input is untrusted. A record is accepted only when every field is present, of its type and in
its range.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin, get_type_hints

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable
from memfit.estimators.base.reading.strict_json import parse_object, plain
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import SCHEMA, Measurement

COLLECTION_SCHEMA = "memfit.measurements/1"
MAX_COLLECTION_BYTES = 8_000_000  # a measurement of three repeats takes two kilobytes
MAX_COLLECTION_VALUES = 200_000  # and sixty values
MAX_FIGURE = 2**63 - 1
MAX_TEXT = 8192
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{8}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)", re.ASCII)
_NAMES = {"memfit.measurement": SCHEMA, "memfit.measurements": COLLECTION_SCHEMA}


class NewerSchemaError(InputError):
    """The file was written by a newer memfit, and must not be changed."""


def measurement_id(
    *,
    fingerprint: str,
    device: str,
    mlx_version: str,
    mlx_lm_version: str,
    workload: Workload,
    wired_limit_bytes: int | None,
) -> str:
    """Return the id of a measurement, such as ``0f3c9a12-77c0de14``.

    It is a hash of everything that must be equal for a measurement to be valid again, so that a
    new measurement replaces the old one. The first half depends on the checkpoint only.
    """
    key = (fingerprint, device, mlx_version, mlx_lm_version, asdict(workload), wired_limit_bytes)
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return f"{fingerprint[:8]}-{hashlib.sha256(text.encode('utf-8')).hexdigest()[:8]}"


def to_text(measurement: Measurement) -> str:
    """Return the content of the file of one measurement."""
    return _dumped(_as_data(measurement))


def collection_text(measurements: Iterable[Measurement]) -> str:
    """Return measurements as one text, which `parse_collection` reads."""
    records = [_as_data(measurement) for measurement in measurements]
    return _dumped(
        {"schema": COLLECTION_SCHEMA, "memfit_version": __version__, "measurements": records}
    )


def parse_measurement(content: bytes, path: PurePath) -> Measurement:
    """Return the measurement of a file's content.

    Raises:
        InputError: naming the file and the key, when it is damaged.
        NewerSchemaError: when a newer memfit wrote it.
    """
    return _measurement(_parsed(content, path, "the measurement"), f"{printable(path)}: ")


def parse_collection(content: bytes, path: PurePath) -> tuple[Measurement, ...]:
    """Return the measurements of a collection, all of them or none.

    Raises:
        InputError: naming the file and the key, when it is damaged.
        NewerSchemaError: when a newer memfit wrote it.
    """
    data = _parsed(content, path, "the collection of measurements")
    place = f"{printable(path)}: "
    _require_schema(data, COLLECTION_SCHEMA, place)
    records = data.get("measurements")
    if not isinstance(records, list):
        raise InputError(f"{place}measurements: expected a list, got {_shown(records)}")
    return tuple(
        _measurement(record, f"{place}measurements[{index}].")
        for index, record in enumerate(records)
    )


def _as_data(measurement: Measurement) -> dict[str, Any]:
    return {"schema": measurement.schema, **asdict(measurement)}


def _dumped(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _parsed(content: bytes, path: PurePath, what: str) -> dict[str, Any]:
    value = parse_object(
        content, path, what=what, error=InputError, max_values=MAX_COLLECTION_VALUES
    )
    data: dict[str, Any] = plain(value, printable(path), error=InputError)
    return data


def _measurement(data: Any, place: str) -> Measurement:
    if isinstance(data, dict):
        _require_schema(data, SCHEMA, place)
    found = _record(Measurement, data, place)
    assert isinstance(found, Measurement)
    if not _FINGERPRINT.fullmatch(found.fingerprint):
        raise InputError(f"{place}fingerprint: expected 64 hexadecimal digits")
    if not _TIME.fullmatch(found.measured_at):
        raise InputError(f"{place}measured_at: expected a time such as 2026-01-31T12:00:00+00:00")
    if not found.runs:
        raise InputError(f"{place}runs: expected at least one")
    expected = measurement_id(
        fingerprint=found.fingerprint,
        device=found.device,
        mlx_version=found.mlx_version,
        mlx_lm_version=found.mlx_lm_version,
        workload=found.workload,
        wired_limit_bytes=found.wired_limit_bytes,
    )
    if found.id != expected:
        raise InputError(f"{place}id: expected {expected}, got {printable(found.id)}")
    return found


def _require_schema(data: Mapping[str, Any], expected: str, place: str) -> None:
    if data.get("schema") == expected:
        return
    name, _, version = str(data.get("schema")).partition("/")
    if _NAMES.get(name) == expected and re.fullmatch(r"[1-9][0-9]{0,5}", version, re.ASCII):
        raise NewerSchemaError(
            f"{place}schema: {name}/{version} is from a newer memfit, this version reads"
            f" {expected}; update memfit"
        )
    raise InputError(f"{place}schema: expected {expected}, got {_shown(data.get('schema'))}")


def _record(kind: type, value: Any, place: str) -> Any:
    """Convert a mapping to a dataclass; its keys must be exactly the fields."""
    if not isinstance(value, dict):
        raise InputError(f"{place.rstrip('.: ')}: expected an object, got {_shown(value)}")
    types = _types(kind)
    if unknown := [key for key in value if key not in types]:
        raise InputError(
            f"{place}{printable(unknown[0])}: unknown key in a {kind.__name__.lower()}"
        )
    if missing := [name for name in types if name not in value]:
        raise InputError(f"{place}{missing[0]}: missing")
    read = {name: _value(each, value[name], f"{place}{name}") for name, each in types.items()}
    try:
        return kind(**read)
    except InputError as error:
        raise InputError(f"{place.rstrip('.: ')}: {error}") from None


@cache
def _types(kind: type) -> dict[str, Any]:
    """The declared type of each field."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(kind: Any, value: Any, place: str) -> Any:
    """Convert a value to the declared type of its field."""
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _record(kind, value, f"{place}.")
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise InputError(f"{place}: expected a list, got {_shown(value)}")
        item = get_args(kind)[0]
        return tuple(_value(item, each, f"{place}[{n}]") for n, each in enumerate(value))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InputError(f"{place}: expected {' or '.join(get_args(kind))}")
        return value
    if type(None) in get_args(kind):
        return None if value is None else _value(get_args(kind)[0], value, place)
    return _count(value, place) if kind is int else _text(value, place)


def _count(value: Any, place: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_FIGURE:
        raise InputError(
            f"{place}: expected an integer from 0 to {MAX_FIGURE}, got {_shown(value)}"
        )
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= MAX_TEXT:
        raise InputError(f"{place}: expected a text of one line, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return printable(repr(value)[:60])
