"""Run a model over several ranks with mlx.launch, and read what each of them took.

The launcher and its ranks are one session of processes: after `measure_ranks` none of them is left.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Annotated

from msgspec import DecodeError, Meta, Struct, to_builtins
from msgspec.json import decode

from memfit.estimators.base.errors import (
    CheckpointError,
    MachineError,
    MemfitError,
    UnsupportedError,
)
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.unfinished import unfinished_folder
from memfit.estimators.base.units import Count
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.probes.process import CHILD_ENVIRONMENT, ending, require_installed

_ERRORS: dict[str, type[MemfitError]] = {
    kind.__name__: kind for kind in (CheckpointError, UnsupportedError)
}
# mlx.launch, which is a script without a module of its own name. It ends its session when this
# process does, also when that is killed: nothing is written to the pipe, so the read ends then.
_LAUNCHER = """
import os, signal, sys, threading
from mlx._distributed_utils.launch import main
def end(pipe=int(sys.argv.pop(1))):
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
main()
"""
_EXITED = re.compile(r"Node with rank (\d+) exited with code (-?\d+)")
# Signs of life come twice a second.
_SILENT_SECONDS = 3.0
_POLL_SECONDS = 0.5
_TAIL_LINES = 40
# What MLX says in the ranks that are left (mlx ring.cpp): it names another one that is gone.
_LOST = "[ring] connection to a peer was lost"
# What a rank does too long, by the stages that it has done.
_TOO_LONG = (
    *("did not start", "is not connected to the others"),
    *("does not finish loading", "makes no progress"),
)
_LAST_STAGE = len(_TOO_LONG)


class RankError(Struct, frozen=True):
    """Why a rank cannot go on."""

    kind: str
    """The name of its class."""
    text: str


class RankState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a rank is, whole in every message.

    Messages of several ranks are merged as bytes arrive: one that is lost does no harm.
    """

    rank: Count
    pid: Annotated[int, Meta(ge=1)]
    steps: Count = 0
    """Reports of progress so far."""
    connected: bool = False
    loaded: Loaded | None = None
    run: Run | None = None
    error: RankError | None = None

    @property
    def stage(self) -> int:
        """How many of the stages are done: started, connected, loaded, run."""
        return 1 + self.connected + (self.loaded is not None) + (self.run is not None)


class RankRequest(Struct, frozen=True, kw_only=True):
    """A model to run over ranks."""

    path: Path
    size: int
    parallel: Parallel
    split: tuple[int, ...] | None
    workload: Workload
    timeout_seconds: float
    """The longest time in which no rank makes progress."""
    memory_limit_bytes: int | None = None
    """Of each rank."""
    hostfile: Path | None = None
    """None: all on this machine."""


class RankRun(Struct, frozen=True):
    loaded: Loaded
    run: Run


class RankStopped(MachineError):  # noqa: N818 - names an event, as ProbeStopped does
    """A rank ended, hung, could not connect or ran out of memory; the run is over."""


def measure_ranks(request: RankRequest, progress: Progress = NULL_PROGRESS) -> tuple[RankRun, ...]:
    """Return what every rank took in one run of a workload.

    Raises:
        CheckpointError: when a rank finds no weights that match the config.
        UnsupportedError: when mlx-lm does not run the model over such ranks.
        RankStopped: when a rank ends, hangs or cannot connect; it is named.
    """
    require_installed(has_image=False)
    with unfinished_folder() as folder:
        launched = _Launched(request, folder)
        try:
            return launched.wait(progress)
        finally:
            launched.end()


class _Launched:
    """mlx.launch with its ranks, and the messages of these."""

    def __init__(self, request: RankRequest, folder: Path) -> None:
        self._request = request
        self._states: dict[int, RankState] = {}
        self._heard: dict[int, float] = {}
        self._progress = time.monotonic()
        self._errors: list[str] = []
        self._lines: SimpleQueue[tuple[str, str]] = SimpleQueue()
        alive, self._until_end = os.pipe()
        self._process = subprocess.Popen(
            _command(request, alive),
            pass_fds=(alive,),
            stdin=subprocess.PIPE,  # mlx.launch reads it, and never ends at an empty one
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # It leaves files of its own in the folder for temporary ones.
            env={**os.environ, **CHILD_ENVIRONMENT, "TMPDIR": str(folder)},
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        os.close(alive)
        self._readers = [
            Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in (("out", self._process.stdout), ("err", self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put((name, line))

    def wait(self, progress: Progress) -> tuple[RankRun, ...]:
        """Return the runs of all ranks once each has reported its own."""
        size = self._request.size
        progress.begin(f"running on {size} ranks", size * _LAST_STAGE)
        while self._stage() < _LAST_STAGE:
            self._take_lines(progress)
            if self._stage() < _LAST_STAGE:
                self._require_alive()
        states = (self._states[rank] for rank in range(size))
        return tuple(RankRun(s.loaded, s.run) for s in states if s.loaded and s.run)

    def end(self) -> None:
        """Kill whatever is left of the session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._until_end)
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=_SILENT_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError):
                if pipe:
                    pipe.close()

    def _take_lines(self, progress: Progress) -> None:
        wait = _POLL_SECONDS
        while True:
            try:
                name, line = self._lines.get(timeout=wait)
            except Empty:
                return
            wait = 0.0
            if name == "err":
                self._errors = [*self._errors[-_TAIL_LINES:], line.rstrip()]
            else:
                self._take(line, progress)

    def _take(self, line: str, progress: Progress) -> None:
        try:
            state = decode(line, type=RankState)
        except DecodeError:
            return  # what a library prints
        before = self._states.get(state.rank)
        self._states[state.rank], self._heard[state.rank] = state, time.monotonic()
        if state == before:
            return
        self._progress = time.monotonic()
        if state.error and _LOST not in state.error.text:
            kind = _ERRORS.get(state.error.kind, RankStopped)
            raise kind(f"rank {state.rank}: {state.error.text}")
        progress.advance(state.stage - (before.stage if before else 0))

    def _require_alive(self) -> None:
        now = time.monotonic()
        if self._process.poll() is not None and self._lines.empty():
            for reader in self._readers:
                reader.join(timeout=_SILENT_SECONDS)
            if self._lines.empty():
                raise RankStopped(self._exit_reason())
        if exited := self._first_exit():
            # What the rank said itself may still be on its way.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_SILENT_SECONDS)
            self._take_lines(NULL_PROGRESS)
            raise RankStopped(exited)
        left = [rank for rank, state in self._states.items() if state.error]
        if left and now - self._progress > _SILENT_SECONDS:
            gone = [rank for rank in range(self._request.size) if rank not in left]
            raise RankStopped(f"{_ranks(gone or left)}: the connection was lost")
        silent = [rank for rank, heard in self._heard.items() if now - heard > _SILENT_SECONDS]
        # One that waits in a call of MLX can be silent too: the system knows which is stopped.
        if not self._request.hostfile and (stopped := list(filter(self._is_stopped, silent))):
            raise RankStopped(f"{_ranks(stopped)}: stopped by a signal; the run is ended")
        if now - self._progress > self._request.timeout_seconds:
            raise RankStopped(self._hung(silent))

    def _first_exit(self) -> str | None:
        for line in self._errors:
            if (found := _EXITED.search(line)) and (code := int(found[2])):
                by_ssh = ", as ssh does after a failed connection or a signal to the rank"
                reason = ending(code) + (by_ssh if code == 255 else "")  # man ssh, EXIT STATUS
                return f"rank {found[1]}: {reason}{self._tail()}"
        return None

    def _exit_reason(self) -> str:
        missing = [rank for rank in range(self._request.size) if self._stage(rank) < _LAST_STAGE]
        return (
            self._first_exit() or f"{_ranks(missing)}: mlx.launch ended without them{self._tail()}"
        )

    def _hung(self, silent: list[int]) -> str:
        """Name the ranks that are silent, else those that are behind the others."""
        stage = self._stage()
        behind = [rank for rank in range(self._request.size) if self._stage(rank) == stage]
        what = _TOO_LONG[stage]
        if silent and stage > 1:  # a rank that connects is silent while it waits
            behind, what = silent, "stopped answering"
        return (
            f"{_ranks(behind)}: {what} for {self._request.timeout_seconds:g} s; the run is ended,"
            " a slow one needs a longer timeout"
        )

    def _stage(self, rank: int | None = None) -> int:
        """Return how far a rank is, or that which is behind the others."""
        if rank is None:
            return min(map(self._stage, range(self._request.size)))
        state = self._states.get(rank)
        return state.stage if state else 0

    def _is_stopped(self, rank: int) -> bool:
        command = ("ps", "-o", "stat=", "-p", str(self._states[rank].pid))
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return found.strip()[:1] == "T"

    def _tail(self) -> str:
        said = [line for line in self._errors if line.strip() and "[WARN]" not in line]
        return f": {printable(said[-1])[:300]}" if said else ""


def _command(request: RankRequest, alive: int) -> list[str]:
    setup = {
        "path": str(request.path.absolute()),
        "parallel": request.parallel,
        "split": request.split,
        "workload": to_builtins(request.workload),
        "memory_limit_bytes": request.memory_limit_bytes,
    }
    hosts = ["--repeat-hosts", str(request.size), "--starting-port", str(_free_port(request.size))]
    if request.hostfile:
        hosts = ["--hostfile", str(request.hostfile.absolute())]
    environment = [f"--env={name}={value}" for name, value in CHILD_ENVIRONMENT.items()]
    child = [sys.executable, "-m", "memfit.probes.rank_child", json.dumps(setup)]
    launcher = [
        sys.executable,
        "-c",
        _LAUNCHER,
        str(alive),
        *hosts,
        "--backend",
        "ring",
        *environment,
    ]
    return [*launcher, "--", *child]


def _free_port(count: int) -> int:
    """Return the first of ``count`` ports that nobody on this machine listens on."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        if first + count < 2**16 and all(_is_free(first + n) for n in range(count)):
            return first
    raise MachineError(f"no {count} free ports in a row for the ranks")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
