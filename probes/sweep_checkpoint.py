"""The progress of an unfinished sweep, saved so that the same sweep can continue.

The file lists ids of measurements; the store holds the measurements themselves.
"""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field, to_builtins

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import read_whole
from memfit.estimators.base.reading.section import json_section
from memfit.estimators.base.reading.typed import to_record
from memfit.estimators.runtimes.measurement import Measurement
from memfit.probes.data_dir import memfit_home, save
from memfit.probes.store import Store, user_store

_MAX_BYTES = 1_000_000
_MAX_VALUES = 10_000


class _Saved(Struct, frozen=True, tag_field="schema", tag="memfit.sweep/1"):
    measurements: list[str]
    """Ids."""


class SweepCheckpoint:
    """The finished measurements of one sweep, in a file named by a hash of its settings."""

    def __init__(self, path: Path, store: Store) -> None:
        """Take the file, which need not exist, and the store with the measurements."""
        self._path, self._store = path, store
        self.is_complete = False  # set when no point is left
        self._ids = self._read()

    def measured(self) -> dict[str, Measurement]:
        """Return the listed measurements, by id; those removed from the store are left out."""
        found = {}
        for id in self._read():
            with suppress(InputError):
                found[id] = self._store.get(id)
        return found

    def add(self, id: str) -> None:
        """Add a measurement to the list, and keep what another process running this sweep added.

        Raises:
            InputError: when the file cannot be written.
        """
        ids = list(dict.fromkeys([*self._ids, *self._read(), id]))
        save(self._path, json.dumps(to_builtins(_Saved(ids)), indent=2) + "\n")
        self._ids = ids

    def finish(self) -> None:
        """Remove the file: the next such sweep starts from the beginning."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self) -> list[str]:
        """The listed ids; a missing or damaged file, or another version's, counts as empty."""
        try:
            content = read_whole(self._path, limit=_MAX_BYTES)
            top = json_section(content, self._path, what="the sweep", max_values=_MAX_VALUES)
            return to_record(_Saved, top.values, top.reading).measurements
        except InputError:
            return []


class Sweeps(Struct, frozen=True):
    """The directory of unfinished sweeps, and the store of their measurements."""

    directory: Path
    store: Store
    _opened: list[SweepCheckpoint] = field(default_factory=list)

    def finish(self) -> None:
        """Remove the files of complete sweeps: to be called when their report is written."""
        for checkpoint in self._opened:
            if checkpoint.is_complete:
                checkpoint.finish()

    def checkpoint(self, ids: Iterable[str], prompt: str | None) -> SweepCheckpoint:
        """Return the checkpoint of the sweep with these points.

        An id is a hash of checkpoint, device, versions and workload.
        """
        key = json.dumps([sorted(ids), prompt]).encode()
        name = f"{hashlib.sha256(key).hexdigest()[:16]}.json"
        self._opened.append(SweepCheckpoint(self.directory / name, self.store))
        return self._opened[-1]


def user_sweeps() -> Sweeps:
    """Return the user's sweeps, in MEMFIT_HOME or the platform's data directory."""
    return Sweeps(memfit_home() / "sweeps", user_store())
