"""Measure many workloads one after another; a failed one does not end the sweep.

    sweep(session, workloads, checkpoint=...) -> SweepOutcome

The progress of an unfinished sweep is saved, so that the same sweep can continue: a file lists the
ids of its measurements, and the store has the measurements themselves.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field, to_builtins

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import read_whole
from memfit.estimators.base.progress import reported
from memfit.estimators.base.reading.section import json_section, to_record
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Measurement
from memfit.probes.experiments.points import STEPS, Points
from memfit.probes.preflight import obstacle, require_room
from memfit.probes.result import Point
from memfit.probes.store import Store, memfit_home, save, user_store

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


class SweepInterrupted(KeyboardInterrupt):
    """The user stopped a sweep; finished measurements are saved."""


class SweepOutcome(NamedTuple):
    """The result of a sweep."""

    points: tuple[Point, ...]
    """One for each workload."""
    known: int
    """How many of them were measured by an earlier, unfinished sweep."""


def sweep(
    session: Points,
    workloads: Sequence[Workload],
    *,
    checkpoint: SweepCheckpoint,
) -> SweepOutcome:
    """Return a point for each workload: measured, skipped with the reason, or failed.

    The first workload is the one that the user requested, and must run. Measurements listed in
    ``checkpoint`` are not repeated. A process that dies fails only its own point. The checkpoint
    is complete when no point failed; otherwise the same sweep measures the failed ones again.

    Raises:
        CheckpointError: when the weights do not match the config.
        UnsupportedError: when the first workload cannot run.
        RefusedError: when there is too little memory for the first workload.
        SweepInterrupted: on Ctrl-C; the message says how to continue.
    """
    force, progress = session.request.force, session.progress
    known = {each.workload: each for each in checkpoint.measured().values()}
    requested = workloads[0]
    if requested not in known and not force:
        require_room(session.sized, requested, session.request.units)
    reasons = {} if force else _obstacles(session, workloads)
    left = [work for work in workloads if work not in known and work not in reasons]
    points: dict[Workload, Point] = {}
    steps = sum(STEPS * work.total_tokens for work in left)  # time grows with the tokens
    try:
        with reported(progress, _title(len(left), len(known)), steps):
            for work in left:
                points[work] = _measured(session, work, must_run=work == requested)
                if id := points[work].measurement_id:
                    _add_to_checkpoint(session, checkpoint, id)
    except KeyboardInterrupt:
        done = len(checkpoint.measured())
        raise SweepInterrupted(
            f"interrupted: {done} of {len(workloads)} points are measured and saved; the same"
            " command continues from there"
        ) from None
    if all(point.status != "failed" for point in points.values()):
        checkpoint.is_complete = True
    for work in workloads:
        if measurement := known.get(work):
            points[work] = session.from_measurement(measurement)
        elif work not in points:
            points[work] = session.skipped(work, reasons[work])
    return SweepOutcome(tuple(points[work] for work in workloads), len(known))


def _obstacles(session: Points, workloads: Sequence[Workload]) -> dict[Workload, str]:
    """Why workloads are skipped, for those that are; a trace takes a second or more."""
    reasons, limit = {}, session.sized.model.max_context
    with reported(session.progress, f"estimating {len(workloads)} points", len(workloads)):
        for work in workloads:
            if limit and work.total_tokens > limit:
                reasons[work] = f"more than the model's own limit of {limit} tokens"
            elif reason := obstacle(session.sized, work, session.request.units):
                reasons[work] = reason
            session.progress.advance()
    return reasons


def _measured(session: Points, workload: Workload, *, must_run: bool) -> Point:
    session.steps_per_run, before = workload.total_tokens, session.finished_runs
    point = session.measure(workload) if must_run else session.measure_if_supported(workload)
    left = STEPS - (session.finished_runs - before)  # when a point ended early
    session.progress.advance(left * workload.total_tokens)
    return point


def _add_to_checkpoint(session: Points, checkpoint: SweepCheckpoint, id: str) -> None:
    try:
        checkpoint.add(id)
    except InputError as error:
        session.warn_unsaved("the measurement", error)


def _title(left: int, known: int) -> str:
    return f"measuring {left} points" + (f", {known} were measured before" if known else "")
