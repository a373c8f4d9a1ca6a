"""This user's saved measurements: one file each, safe for several processes at once."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from memfit.estimators.base.errors import CheckpointError, InputError
from memfit.estimators.base.files import printable, read_whole, write_atomically
from memfit.estimators.runtimes.measurement import Measurement
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


def memfit_home() -> Path:
    """Return MEMFIT_HOME, else the platform's directory for user data."""
    if given := os.environ.get("MEMFIT_HOME"):
        return Path(os.path.expanduser(given))
    from platformdirs import user_data_dir

    return Path(user_data_dir("memfit", appauthor=False))


def save(path: Path, text: str, *, overwrite: bool = True) -> bool:
    """Write a file with `write_atomically`; its directory is created.

    Raises:
        InputError: when the directory or the file cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write_atomically(path, text.encode("utf-8"), overwrite=overwrite, durable=True)
    except OSError as error:
        raise InputError(
            f"{printable(path)}: cannot be written: {error.strerror};"
            " set MEMFIT_HOME to another directory"
        ) from None


class StoredMeasurements(NamedTuple):
    measurements: tuple[Measurement, ...]
    """The newest is last."""
    warnings: tuple[str, ...]
    """One for each file that is not a valid measurement."""


class ImportCounts(NamedTuple):
    """How many measurements were added, and how many were already stored."""

    added: int
    skipped: int


class Store:
    """A directory of measurements, one file each, named by its id.

    The directory is created with the first file. A damaged file is renamed to NAME.damaged; a file
    from a newer memfit is not changed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, measurement: Measurement) -> None:
        """Save a measurement; it replaces an older one with the same id.

        Raises:
            InputError: when it cannot be written.
        """
        save(self._path(measurement.id), to_text(measurement))

    def all(self) -> StoredMeasurements:
        return self._load("")

    def of(self, fingerprint: str) -> StoredMeasurements:
        """Return the measurements of a checkpoint; files of others are not read."""
        stored = self._load(fingerprint[:8])
        found = (m for m in stored.measurements if m.fingerprint == fingerprint)
        return StoredMeasurements(tuple(found), stored.warnings)

    def get(self, id: str) -> Measurement:
        """Return a measurement.

        Raises:
            InputError: when there is no measurement with that id, or its file is damaged; a
                damaged file is renamed.
        """
        return self._read_or_rename(self._existing(id))

    def remove(self, ids: Iterable[str]) -> None:
        """Remove measurements; when one id is unknown, none is removed.

        Raises:
            InputError: when there is no measurement with an id, or it cannot be removed.
        """
        for path in [self._existing(id) for id in ids]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise InputError(
                    f"{printable(path)}: cannot be removed: {error.strerror}"
                ) from None

    def add(self, collection: Path) -> ImportCounts:
        """Add the measurements of a collection that are not stored yet; a damaged one adds nothing.

        Raises:
            InputError: when the collection is unreadable or damaged, or cannot be saved.
        """
        content = read_whole(collection, limit=MAX_COLLECTION_BYTES)
        return self._add(parse_collection(content, collection))

    def profile_path(self, fingerprint: str) -> Path:
        """Return the file of a checkpoint's last profile of routed experts."""
        return self.directory.parent / "experts" / f"{fingerprint}{_SUFFIX}"

    def _add(self, measurements: Iterable[Measurement]) -> ImportCounts:
        added = [save(self._path(m.id), to_text(m), overwrite=False) for m in measurements]
        return ImportCounts(sum(added), len(added) - sum(added))

    def _load(self, prefix: str) -> StoredMeasurements:
        measurements, warnings = [], []
        for path in self._files(prefix):
            try:
                measurements.append(self._read_or_rename(path))
            except NewerSchemaError as error:
                warnings.append(f"{error}; the file is not changed")
            except CheckpointError as error:
                if os.path.lexists(path):  # else another process removed it
                    warnings.append(f"{error}; the measurement is not used")
            except InputError as error:
                warnings.append(str(error))
        measurements.sort(key=lambda m: (m.measured_at, m.id))
        return StoredMeasurements(tuple(measurements), tuple(warnings))

    def _read_or_rename(self, path: Path) -> Measurement:
        try:
            return self._read(path)
        except (NewerSchemaError, CheckpointError):
            raise
        except InputError as error:
            raise InputError(f"{error}; {self._rename_damaged(path)}") from None

    def _read(self, path: Path, id: str | None = None) -> Measurement:
        found = parse_measurement(read_whole(path, limit=MAX_RECORD_BYTES), path)
        if found.id != (id or path.stem):
            raise InputError(f"{printable(path)}: contains the measurement {found.id}")
        return found

    def _rename_damaged(self, path: Path) -> str:
        damaged = path.with_name(f"{path.name}.damaged")
        try:
            os.replace(path, damaged)
        except OSError as error:
            return f"it cannot be renamed: {error.strerror}"
        with contextlib.suppress(InputError, OSError):
            # Another process may have replaced it with a valid file in between: restore that.
            self._read(damaged, path.stem)
            os.link(damaged, path)
            damaged.unlink()
        return f"it is renamed to {printable(damaged.name)}"

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
        # The id comes from the command line: it may be any text, such as a path.
        if not ID.fullmatch(id) or not os.path.lexists(path):
            raise InputError(
                f"{printable(id)}: no such measurement in {printable(self.directory)}; memfit"
                " measurements list shows all of them"
            )
        return path


def user_store() -> Store:
    """Return the user's store, in MEMFIT_HOME or the platform's data directory."""
    return Store(memfit_home() / "measurements")
