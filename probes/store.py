"""Measurements kept for this user: one file each, safe with several processes at once."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from memfit.estimators.base.errors import CheckpointError, InputError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.runtimes.measurement import Measurement
from memfit.probes.data_dir import memfit_home, write_atomically
from memfit.probes.measurement_json import (
    ID,
    MAX_COLLECTION_BYTES,
    NewerSchemaError,
    parse_collection,
    parse_measurement,
    to_text,
)

MAX_RECORD_BYTES = 1_000_000
_SUFFIX = ".json"


class Kept(NamedTuple):
    """What was found, the newest last; a warning for each file that is no measurement."""

    measurements: tuple[Measurement, ...]
    warnings: tuple[str, ...]


class Imported(NamedTuple):
    """How many measurements were new, and how many there already."""

    added: int
    skipped: int


class Store:
    """A directory of measurements, each a file named by its id; it is made with the first.

    A file that cannot be read is set aside as NAME.damaged, one of a newer memfit is left alone.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, measurement: Measurement) -> None:
        """Keep a measurement in place of an older one of the same id.

        Raises:
            InputError: when it cannot be written.
        """
        write_atomically(self._path(measurement.id), to_text(measurement))

    def all(self) -> Kept:
        """Return every measurement."""
        return self._kept("")

    def of(self, fingerprint: str) -> Kept:
        """Return the measurements of a checkpoint; the others are not read."""
        kept = self._kept(fingerprint[:8])
        found = (m for m in kept.measurements if m.fingerprint == fingerprint)
        return Kept(tuple(found), kept.warnings)

    def get(self, id: str) -> Measurement:
        """Return a measurement.

        Raises:
            InputError: when there is none of that id, or it is damaged, and then set aside.
        """
        return self._read_or_set_aside(self._existing(id))

    def remove(self, ids: Iterable[str]) -> None:
        """Remove measurements, all of them or none.

        Raises:
            InputError: when there is none of an id, or it cannot be removed.
        """
        for path in [self._existing(id) for id in ids]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise InputError(
                    f"{printable(path)}: cannot be removed: {error.strerror}"
                ) from None

    def add(self, collection: Path) -> Imported:
        """Keep the measurements of a collection that are not here yet: all of it is valid, or none.

        Raises:
            InputError: when it is unreadable or damaged, or cannot be kept.
        """
        content = read_whole(collection, limit=MAX_COLLECTION_BYTES)
        return self._add(parse_collection(content, collection))

    def _add(self, measurements: Iterable[Measurement]) -> Imported:
        added = [
            write_atomically(self._path(m.id), to_text(m), overwrite=False) for m in measurements
        ]
        return Imported(sum(added), len(added) - sum(added))

    def _kept(self, prefix: str) -> Kept:
        measurements, warnings = [], []
        for path in self._files(prefix):
            try:
                measurements.append(self._read_or_set_aside(path))
            except NewerSchemaError as error:
                warnings.append(f"{error}; it is left alone")
            except CheckpointError as error:
                if os.path.lexists(path):  # else another process has removed it
                    warnings.append(f"{error}; the measurement is not used")
            except InputError as error:
                warnings.append(str(error))
        measurements.sort(key=lambda m: (m.measured_at, m.id))
        return Kept(tuple(measurements), tuple(warnings))

    def _read_or_set_aside(self, path: Path) -> Measurement:
        try:
            return self._read(path)
        except (NewerSchemaError, CheckpointError):
            raise
        except InputError as error:
            raise InputError(f"{error}; {self._set_aside(path)}") from None

    def _read(self, path: Path, id: str | None = None) -> Measurement:
        found = parse_measurement(read_whole(path, limit=MAX_RECORD_BYTES), path)
        if found.id != (id or path.stem):
            raise InputError(f"{printable(path)}: holds the measurement {found.id}")
        return found

    def _set_aside(self, path: Path) -> str:
        aside = path.with_name(f"{path.name}.damaged")
        try:
            os.replace(path, aside)
        except OSError as error:
            return f"it cannot be set aside: {error.strerror}"
        with contextlib.suppress(InputError, OSError):
            # If another process has put a whole one there in the meantime, it comes back.
            self._read(aside, path.stem)
            os.link(aside, path)
            aside.unlink()
        return f"it is set aside as {printable(aside.name)}"

    def _files(self, prefix: str) -> Iterator[Path]:
        try:
            names = sorted(os.listdir(self.directory))
        except OSError:
            return
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix == _SUFFIX and stem.startswith(prefix) and ID.fullmatch(stem):
                yield self.directory / name

    def _path(self, id: str) -> Path:
        return self.directory / f"{id}{_SUFFIX}"

    def _existing(self, id: str) -> Path:
        path = self._path(id)
        # An id is typed by someone: it may name anything.
        if not ID.fullmatch(id) or not os.path.lexists(path):
            raise InputError(
                f"{printable(id)}: no such measurement in {printable(self.directory)}; memfit"
                " measurements list shows which there are"
            )
        return path


def user_store() -> Store:
    """Return the user's own store: below MEMFIT_HOME, else the platform's data directory."""
    return Store(memfit_home() / "measurements")
