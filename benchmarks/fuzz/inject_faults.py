"""Let every call to the file system of every command fail once.

    python -m benchmarks.fuzz.inject_faults

tests/faults/shim.c is compiled with cc and loaded before the C library (Linux). Each command below
runs once without a fault, to count its calls; then once for each call and each fault of its kind.
An answer or one clear line is expected, and no file that is half written.
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from errno import EACCES, EINTR, EIO, EMFILE, ENOSPC, EPERM
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from msgspec.structs import replace

from memfit.estimators.base.errors import MemfitError
from memfit.probes.experiments.sweep import SweepCheckpoint
from memfit.probes.experts import prepacked
from memfit.probes.prompt_caches.stored import checked_sha256
from memfit.probes.store import Store
from tests.fuzz.commands import Case, Outcome, faults, run
from tests.fuzz.readers import READERS
from tests.fuzz.workspace import Workspace, environment

SHIM = Path(__file__).parents[2] / "tests" / "faults" / "shim.c"
COMMANDS = (
    "estimate model --json",
    "estimate model.gguf",
    "estimate ollama:any",
    "estimate hub:org/name@main -o out.json",
    "estimate qwen3-0.6b.yaml -o out.yaml",
    "estimate model --adapter=adapter",
    "compare model config --format=markdown",
    "fits .",
    "gate",
    "gate --update",
    "gate --output=junit=out.xml --output=json=out.json",
    "gate init config --device=m4-max-64 --policy=new.yaml",
    "plan context model",
    "plan context model --hosts=hosts.json",
    "plan experts deepseek-v2-lite.yaml --profile=experts-deepseek-v2-lite.json",
    "plan wired wired-server.yaml",
    "plan offload qwen3-0.6b.yaml",
    "plan request --requests=agents.csv",
    "plan static qwen3-0.6b.yaml",
    "plan static model --trace=trace.json --save-trace=out.json",
    "plan ranks --fleet=fleet.yaml",
    "plan growth qwen3-0.6b.yaml",
    "plan server qwen3-0.6b.yaml",
    "plan server model --traffic=traffic.jsonl",
    "plan train model --config=lora.yaml --data=examples --batch-size=9",
    "tune config",
    "tune config --prompt=@prompts.txt",
    "tune experts config --prompts=prompts.txt",
    "measurements list",
    "measurements import all.json",
    "measurements export -o out.json",
    "cache info",
    "cache clear",
)
# What `tune` reads again after it has run a model.
FILES = {
    prepacked.MANIFEST: READERS["pack"].seed,
    prepacked.EXPERTS: b"any",
    "model.safetensors": b"any",
    "model.safetensors.sha256": READERS["stored-cache"].seed,
    "sweep.json": READERS["sweep"].seed,
}
READS: Mapping[str, Callable[[Path], object]] = {
    "experts": lambda at: prepacked.check(at, prepacked.read(at), at, "a" * 64),
    "stored cache": lambda at: checked_sha256(at / "model.safetensors"),
    "sweep": lambda at: SweepCheckpoint(at / "sweep.json", Store(at)).measured(),
}
# The order of `enum operation`, and of `enum change` below zero.
OPERATIONS = ("open", "stat", "read", "write", "fsync", "rename", "list", "chmod")
SHORT, VANISH, CUT, OTHER, EVERY_SHORT = -1, -2, -3, -4, -5
FAULTS = {
    "open": (EACCES, EINTR, EMFILE, EIO, VANISH),
    "stat": (EACCES, EIO, VANISH, CUT),
    "read": (EIO, EINTR, SHORT, EVERY_SHORT, VANISH, CUT, OTHER),
    "write": (ENOSPC, EIO, EINTR, SHORT, EVERY_SHORT),
    "fsync": (EIO, ENOSPC),
    "rename": (EACCES, ENOSPC),
    "list": (EACCES, EIO),
    "chmod": (EPERM,),
}
# What a caller must not notice; Python repeats an interrupted call.
UNSEEN = (EINTR, SHORT, EVERY_SHORT)


class Injected(NamedTuple):
    """One fault: the nth call of an operation."""

    operation: str
    number: int
    kind: int


class Shim:
    """The loaded library."""

    def __init__(self, root: Path) -> None:
        """Let faults strike below a folder only."""
        self._library = ctypes.CDLL(None)
        self._library.fault_struck.restype = ctypes.c_char_p
        self._library.fault_root(os.fsencode(root))

    @contextmanager
    def armed(self, fault: Injected | None) -> Iterator[None]:
        """Let a fault strike inside the block; None counts calls only."""
        operation = OPERATIONS.index(fault.operation) if fault else -1
        number, kind = (fault.number, fault.kind) if fault else (0, 0)
        self._library.fault_arm(operation, number, kind)
        try:
            yield
        finally:
            self.calls = [self._library.fault_calls(i) for i in range(len(OPERATIONS))]
            self.struck = os.fsdecode(self._library.fault_struck())
            self._library.fault_arm(-1, 0, 0)


def main() -> None:
    """Run every fault of every command, or every nth of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="run one fault in N")
    arguments = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        _restart()
    home = Path(os.environ["HOME"])
    try:
        sys.exit(_campaign(home, arguments.every))
    finally:
        shutil.rmtree(home.parent)


def _restart() -> None:
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    library = root / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SHIM), "-ldl"], check=True)
    home = root / "home"
    settings = {**os.environ, **environment(home), "LD_PRELOAD": str(library)}
    os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], settings)


def _campaign(home: Path, every: int) -> int:
    workspace, shim = Workspace(home), Shim(home)
    for first in ("gate --update", "measurements import all.json"):
        run(Case(arguments=tuple(first.split())), workspace, keep=True)
    struck: Counter[str] = Counter()
    found, number, started = 0, 0, time.monotonic()
    for command in COMMANDS:
        case = Case(arguments=tuple(command.split()))
        run(case, workspace)  # imports what it needs
        clean = run(case, workspace, during=shim.armed(None))
        for fault in _faults(shim.calls):
            number += 1
            if number % every:
                continue
            outcome = run(case, workspace, during=shim.armed(fault))
            struck[fault.operation] += bool(shim.struck)
            for problem in _problems(case, outcome, clean, fault, shim.struck):
                found += 1
                print(f"{command}: {fault}, {shim.struck}: {problem}", flush=True)
    for name, read in READS.items():
        _write_files(home)
        with shim.armed(None):
            _attempt(read, home)
        for fault in _faults(shim.calls):
            _write_files(home)
            with shim.armed(fault):
                problem = _attempt(read, home)
            struck[fault.operation] += bool(shim.struck)
            if problem:
                found += 1
                print(f"{name}: {fault}, {shim.struck}: {problem}", flush=True)
    ways = f"{len(COMMANDS)} commands and {len(READS)} readers"
    print(f"{struck.total()} faults struck {ways}: {dict(struck)}")
    print(f"{found} findings, {time.monotonic() - started:.0f} s")
    return bool(found)


def _write_files(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def _attempt(read: Callable[[Path], object], folder: Path) -> str:
    """Return the exception that is not an error of one line, else nothing."""
    try:
        read(folder)
    except MemfitError as error:
        return "" if str(error).isprintable() else f"not one line: {error}"
    except Exception as error:  # noqa: BLE001 - it is the finding
        return f"{type(error).__name__}: {error}"
    return ""


def _faults(calls: list[int]) -> Iterator[Injected]:
    for operation, count in zip(OPERATIONS, calls, strict=True):
        for kind in FAULTS[operation]:
            for number in range(1, 2 if kind == EVERY_SHORT else count + 1):
                yield Injected(operation, number, kind)


def _problems(
    case: Case, outcome: Outcome, clean: Outcome, fault: Injected, struck: str
) -> Iterator[str]:
    struck = os.path.normpath(struck.removeprefix(f"{os.environ['HOME']}/"))
    # A fault that changes a file shows as a change by the command.
    own = {name: text for name, text in outcome.changed.items() if fault.kind > 0 or name != struck}
    yield from faults(case, replace(outcome, changed=own))
    if fault.kind in UNSEEN and (outcome.code, outcome.out) != (clean.code, clean.out):
        yield f"another answer: exit {outcome.code}, {outcome.err[-200:]}"
    if case.arguments[0] == "gate" and outcome.code == 0 and outcome.out != clean.out:
        yield "passes with another report"
    for name, content in own.items():
        # A damaged measurement is moved out of the way as it is.
        if content is not None and not (name.endswith(".damaged") or _is_whole(name, content)):
            yield f"{name} is half written"


def _is_whole(name: str, content: bytes) -> bool:
    try:
        if name.endswith(".json"):
            json.loads(content)
        elif name.endswith(".xml"):
            ElementTree.fromstring(content)
        return content.endswith(b"\n")
    except (ValueError, ElementTree.ParseError):
        return False


if __name__ == "__main__":
    main()
