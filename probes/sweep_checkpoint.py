"""A sweep that was not finished: which of its measurements there are, kept until it is.

The file holds their ids, the store the measurements themselves.
"""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from memfit.estimators.base.errors import CheckpointError, InputError
from memfit.estimators.base.files import read_whole
from memfit.estimators.base.reading.strict_json import parse_object
from memfit.estimators.runtimes.measurement import Measurement
from memfit.probes.data_dir import memfit_home, write_atomically
from memfit.probes.store import Store, user_store

SCHEMA = "memfit.sweep/1"
_MAX_BYTES = 1_000_000
_MAX_VALUES = 10_000


class PartialSweep:
    """What was measured of one sweep, in a file named by all that makes the sweep what it is."""

    def __init__(self, path: Path, store: Store) -> None:
        """Take the file, there or not, and the store that the measurements are in."""
        self._path, self._store = path, store
        self._ids = self._read()

    def measured(self) -> dict[str, Measurement]:
        """Return the measurements that are noted, by id; those no longer kept are left out."""
        found = {}
        for id in self._read():
            with suppress(InputError):
                found[id] = self._store.get(id)
        return found

    def add(self, id: str) -> None:
        """Note that a point is measured, beside what the same sweep in another process noted.

        Raises:
            InputError: when the file cannot be written.
        """
        ids = list(dict.fromkeys([*self._ids, *self._read(), id]))
        data = {"schema": SCHEMA, "measurements": ids}
        write_atomically(self._path, json.dumps(data, indent=2) + "\n")
        self._ids = ids

    def finish(self) -> None:
        """Forget it: the next such sweep begins anew."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self) -> list[str]:
        """The ids; a file that is missing, damaged or of another memfit holds none."""
        try:
            content = read_whole(self._path, limit=_MAX_BYTES)
            data = parse_object(
                content, self._path, what="the sweep", error=CheckpointError, max_values=_MAX_VALUES
            )
        except InputError:
            return []
        ids = data.get("measurements")
        if data.get("schema") != SCHEMA or not isinstance(ids, list):
            return []
        return [id for id in ids if isinstance(id, str)]


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The directory of sweeps that were not finished, and the store of their measurements."""

    directory: Path
    store: Store

    def partial(self, ids: Iterable[str], prompt: str | None) -> PartialSweep:
        """Return what there is of a sweep.

        The ids of its points are made of checkpoint, device, versions and workload.
        """
        key = json.dumps([sorted(ids), prompt]).encode()
        return PartialSweep(
            self.directory / f"{hashlib.sha256(key).hexdigest()[:16]}.json", self.store
        )


def user_sweeps() -> Sweeps:
    """Return the user's own: below MEMFIT_HOME, else the platform's data directory."""
    return Sweeps(memfit_home() / "sweeps", user_store())
