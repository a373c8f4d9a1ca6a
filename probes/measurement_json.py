"""Measurements as JSON: a file with one, or a collection for export to another machine.

The input is untrusted. A record is accepted only when every field is present, of its type and in
its range.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, short
from memfit.estimators.base.reading.section import Reading, Section, json_section, to_record
from memfit.estimators.base.reading.strict_json import Place, plain
from memfit.estimators.results.result import json_text
from memfit.estimators.runtimes.measurement import SCHEMA, Measurement, Measurements, Run

COLLECTION_SCHEMA = "memfit.measurements/1"
MAX_COLLECTION_BYTES = 8_000_000  # a measurement of three repeats takes two kilobytes
MAX_COLLECTION_VALUES = 200_000  # and sixty values
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{8}")
_NAMES = {"memfit.measurement": SCHEMA, "memfit.measurements": COLLECTION_SCHEMA}


class NewerSchemaError(InputError):
    """The file was written by a newer memfit, and must not be changed."""


def measurement_id(of: Mapping[str, Any]) -> str:
    """Return the id of a measurement with these fields, such as ``0f3c9a12-77c0de14``.

    It is a hash of everything that must be equal for a measurement to be valid again, so that a
    new measurement replaces the old one. The first half depends on the checkpoint only.
    """
    fingerprint, caches, training = of["fingerprint"], of.get("caches"), of.get("training")
    key = (
        *(fingerprint, of["device"], of["mlx_version"], of["mlx_lm_version"]),
        to_builtins(of["workload"]),
        of["wired_limit_bytes"],
        *([to_builtins(experts)] if (experts := of.get("experts")) else []),
        *([sorted(cache.bits for cache in caches)] if caches else []),
        *([to_builtins(training.recipe)] if training else []),
        *([version] if (version := of.get("mlx_vlm_version")) else []),
    )
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return f"{fingerprint[:8]}-{hashlib.sha256(text.encode('utf-8')).hexdigest()[:8]}"


def to_text(measurement: Measurement) -> str:
    """Return the content of the file of one measurement."""
    return json_text(measurement) + "\n"


def collection_text(measurements: Iterable[Measurement]) -> str:
    """Return measurements as one text, which `parse_collection` reads."""
    return json_text(Measurements(measurements=tuple(measurements))) + "\n"


def parse_measurement(content: bytes, path: PurePath) -> Measurement:
    """Return the measurement of a file's content.

    Raises:
        InputError: naming the file and the key, when it is damaged.
        NewerSchemaError: when a newer memfit wrote it.
    """
    top = _parsed(content, path, "the measurement")
    return _measurement(top.values, top.reading, ())


def parse_collection(content: bytes, path: PurePath) -> tuple[Measurement, ...]:
    """Return the measurements of a collection, all of them or none.

    Raises:
        InputError: naming the file and the key, when it is damaged.
        NewerSchemaError: when a newer memfit wrote it.
    """
    top = _parsed(content, path, "the collection of measurements")
    _require_schema(top, COLLECTION_SCHEMA)
    records = top.values.get("measurements")
    if not isinstance(records, list):
        raise top.fail("measurements", f"expected a list, got {short(records)}")
    return tuple(
        _measurement(record, top.reading, ("measurements", index))
        for index, record in enumerate(records)
    )


def _parsed(content: bytes, path: PurePath, what: str) -> Section:
    top = json_section(content, path, what=what, max_values=MAX_COLLECTION_VALUES)
    values: dict[str, Any] = plain(top.values, printable(path), error=InputError)
    return Section(values, top.reading)


def _measurement(data: Any, reading: Reading, place: Place) -> Measurement:
    section = reading.section(data, place)
    _require_schema(section, SCHEMA)
    found = to_record(Measurement, data, reading, place)
    expected = measurement_id(asdict(found))
    if found.id != expected:
        raise section.fail("id", f"expected {expected}, got {printable(found.id)}")
    weights = found.loaded.weights_bytes
    if weights == 0:
        raise section.fail("loaded", "weights_bytes is 0: a loaded model has weights")
    if any(run.peak_bytes < weights for run in found.all_runs):
        raise section.fail("runs", "a peak is below the weights, which are part of it")
    if found.training is None and any(_holds_nothing(run) for run in found.all_runs):
        raise section.fail("runs", "its KV cache and states are of 0 bytes, which no run has")
    return found


def _holds_nothing(run: Run) -> bool:
    return not (run.kv_bytes and run.kv_held_bytes) and not run.ssm_bytes


def _require_schema(section: Section, expected: str) -> None:
    schema = section.values.get("schema")
    if schema == expected:
        return
    name, _, version = str(schema).partition("/")
    if _NAMES.get(name) == expected and re.fullmatch(r"[1-9][0-9]{0,5}", version, re.ASCII):
        newer = f"{name}/{version} is from a newer memfit, this version reads {expected}"
        raise NewerSchemaError(str(section.fail("schema", f"{newer}; update memfit")))
    raise section.fail("schema", f"expected {expected}, got {short(schema)}")
