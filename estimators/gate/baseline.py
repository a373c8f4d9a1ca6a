"""The baseline: the figures of each target, in memfit.lock.json next to the policy.

The bytes are stable, with sorted names and no dates: a diff of the file is a change of figures.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.reading.section import Reading, Section, json_section
from memfit.estimators.base.reading.typed import Parsers, to_record
from memfit.estimators.base.reading.values import as_count, as_object, as_text
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.fingerprint import config_sha256
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.results.gate import FigureChange, GateFigures
from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME
from memfit.estimators.runtimes.runtime import Runtime

NAME = "memfit.lock.json"
VERSION = 1
SCHEMA = f"memfit.lock/{VERSION}"
MAX_LOCK_BYTES = 6_000_000  # a target takes two kilobytes
MAX_LOCK_VALUES = 200_000
_PARSERS: Parsers = {int: partial(as_count, most=2**128), str: as_text, Any: lambda value: value}
_COMPARED = (
    "weights_bytes",
    "kv_bytes_per_token",
    "state_bytes",
    "workspace_bytes",
    "peak_bytes",
    "context_tokens",
    "expert_capacity",
)


class Fingerprint(Struct, frozen=True):
    """Which checkpoint the figures are of: its revision, and digests of config and headers."""

    revision: str | None
    config_sha256: str
    headers_sha256: Mapping[str, str]
    """By file name."""


class BaselineEntry(Struct, frozen=True):
    """One target as it was."""

    model: str
    quantize: int | None
    model_type: str
    asked: Mapping[str, Any]
    """The question without its model, as `asked` returns it."""
    checkpoint: Fingerprint
    figures: GateFigures


class Baseline(Struct, frozen=True):
    """The entries of all targets."""

    memfit_version: str
    """The memfit that computed them."""
    targets: Mapping[str, BaselineEntry]


def fingerprint(checkpoint: Checkpoint) -> Fingerprint:
    """Return the fingerprint of a checkpoint; spacing and order of its config do not matter."""
    headers = dict(checkpoint.header_sha256)
    return Fingerprint(checkpoint.revision, config_sha256(checkpoint), headers)


def asked(device: Device, runtime: Runtime, workload: Workload) -> dict[str, Any]:
    """Return the question without its model: figures of different questions do not compare."""
    return {"device": device.name, "runtime": runtime.name, "workload": to_builtins(workload)}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a question differs from the baseline's."""
    for key in ("device", "runtime"):
        if before[key] != now[key]:
            yield f"{key} {before[key]}, now {now[key]}"
    for key, value in now["workload"].items():
        if before["workload"].get(key) != value:
            yield f"{key} {before['workload'].get(key)}, now {value}"


def replaced(before: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """Return what differs between two checkpoints of one name."""
    parts = []
    if before.revision != now.revision:
        parts.append(f"revision {before.revision}, now {now.revision}")
    if before.config_sha256 != now.config_sha256:
        parts.append("config.json")
    old, new = before.headers_sha256, now.headers_sha256
    changed = [name for name in new if name in old and old[name] != new[name]]
    parts += [f"the header of {name}" for name in changed[:3]]
    if len(changed) > 3:
        parts.append(f"{len(changed) - 3} more headers")
    if old.keys() != new.keys():
        parts.append(f"the set of shards ({len(old)}, now {len(new)})")
    return tuple(parts)


def changes(before: GateFigures, now: GateFigures) -> Iterator[FigureChange]:
    """Yield the compared figures, those that did not change as well."""
    for name in _COMPARED:
        old, new = getattr(before, name), getattr(now, name)
        yield FigureChange(name, old, new, None if old is None or new is None else new - old)


def to_text(baseline: Baseline) -> str:
    """Return the text of the baseline's file."""
    data = {"schema": SCHEMA, **to_builtins(baseline)}
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_baseline(path: Path) -> Baseline:
    """Return the baseline of a file.

    Raises:
        CheckpointError: when the file is missing or unreadable.
        InputError: when it is damaged, or written by a newer memfit.
    """
    top = json_section(
        read_whole(path, limit=MAX_LOCK_BYTES),
        path,
        what="the baseline",
        max_values=MAX_LOCK_VALUES,
    )
    _reject_newer(top)
    try:
        values = {key: value for key, value in top.values.items() if key != "schema"}
        baseline = to_record(Baseline, values, top.reading, _PARSERS)
        entries = {
            name: replace(entry, asked=_asked(entry.asked, top.reading, name))
            for name, entry in baseline.targets.items()
        }
    except InputError as fault:
        raise InputError(
            f"{fault}; the baseline is damaged: restore it from version control, or delete it and"
            " run memfit gate --update"
        ) from None
    return replace(baseline, targets=entries)


def _asked(question: Mapping[str, Any], reading: Reading, name: str) -> dict[str, Any]:
    # Where a baseline names no runtime, it is of this one.
    section = Section({"runtime": DEFAULT_RUNTIME, **question}, reading, ("targets", name, "asked"))
    for key in ("device", "runtime"):
        section.text(key)
    section.need("workload", as_object)
    return dict(section.values)


def _reject_newer(top: Section) -> None:
    schema = re.fullmatch(r"memfit\.lock/([0-9]{1,6})", str(top.values.get("schema")))
    if not schema or int(schema[1]) < 1:
        raise top.fail("schema", f"expected {SCHEMA}; is it a baseline?")
    version = str(top.values.get("memfit_version"))
    if int(schema[1]) > VERSION or _numbers(version) > _numbers(__version__):
        raise top.fail(
            None,
            f"written by a newer memfit ({printable(version)}, {schema[0]});"
            f" this is {__version__} with {SCHEMA}: update memfit",
        )


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}", version)
    return tuple(map(int, release[0].split("."))) if release else ()
