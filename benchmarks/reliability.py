"""Kill memfit at random moments, and look at what is left.

    python -m benchmarks.reliability --kills 1000

Needs mlx and mlx-lm. A kill counts only when SIGKILL ended the process. After each, every file that
the command writes must be the one from before or a complete new one, and none of its processes may
live on. At the end each command runs once more, and must answer as it did at first. Ctrl-C is tried
the same way: a command must end without a traceback. docs/reliability.md has the figures.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from memfit.cli.exits import Exit
from memfit.estimators.base.unfinished import UNFINISHED
from tests.checkpoints import RECIPES, save_checkpoint
from tests.fuzz.workspace import Workspace, environment

SHORT = "--prompt-tokens 20 --max-tokens 2"


class Command(NamedTuple):
    """Arguments, and how many of a hundred kills are of it."""

    arguments: str
    share: int


COMMANDS = (
    Command("estimate model --json -o out.json", 30),
    Command("estimate hub:org/name@main --json -o out.json", 15),
    Command("gate --update", 15),
    Command("gate --output json=out.json --output junit=out.xml", 20),
    Command(f"tune dense {SHORT} --json -o out.json", 10),
    Command(f"tune dense {SHORT} --sweep prefill-step=16,32,64 --json -o out.json", 10),
)
MOST_SECONDS = 30
# What the installed command is.
SCRIPT = "from memfit.cli.__main__ import main; main()"


def main() -> None:
    """Kill as often as asked, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    # A shell that starts this in the background lets it ignore Ctrl-C, and its children too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        Workspace(home)
        save_checkpoint(home / "dense", RECIPES["dense"])
        bench = Bench(home)
        bench.kill(arguments.kills)
        bench.interrupt(arguments.interrupts)
        bench.rerun()
        for name, count in sorted(bench.counts.items()):
            print(f"{count:6} {name}")
    sys.exit(any(name.startswith("FINDING") for name in bench.counts))


class Bench:
    """A home directory, and what happened in it."""

    def __init__(self, home: Path) -> None:
        """Run each command once: its time, and its answer."""
        self.home, self.counts = home, Counter[str]()
        self._environment = {**os.environ, **environment(home)}
        self._seconds: dict[Command, float] = {}
        for command in COMMANDS:
            started = time.monotonic()
            self._finish(command)
            self._seconds[command] = time.monotonic() - started
        self._answers = {command: self._finish(command) for command in COMMANDS}

    def kill(self, kills: int) -> None:
        """Send SIGKILL at random moments, until enough have hit."""
        for command in COMMANDS:
            wanted = kills * command.share // 100
            while self.counts[f"killed: {command.arguments}"] < wanted:
                process = self._start(command)
                time.sleep(random.uniform(0, self._seconds[command]))
                process.kill()
                process.communicate()
                hit = process.returncode == -signal.SIGKILL
                self.counts[f"{'killed' if hit else 'ended before'}: {command.arguments}"] += 1
                self._wait_for_children(process.pid, command)
                self._check_files(command)

    def interrupt(self, times: int) -> None:
        """Send SIGINT at a random moment of an estimate."""
        command = COMMANDS[0]
        for _ in range(times):
            process = self._start(command)
            time.sleep(random.uniform(0, self._seconds[command]))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
            self.counts[f"interrupted: exit {process.returncode}"] += 1
            # A traceback of Python's own start has no line of memfit.
            if b"Traceback" in errors and b"memfit" not in errors:
                self.counts["interrupted: before Python's own start was over"] += 1
            elif b"Traceback" in errors or process.returncode == Exit.BUG:
                self.counts["FINDING after Ctrl-C"] += 1
                print(errors.decode(), flush=True)

    def rerun(self) -> None:
        """Run each command once more and compare its answer with the first."""
        for command, answer in self._answers.items():
            if self._finish(command) != answer:
                self.counts[f"FINDING another answer: {command.arguments}"] += 1
            self.counts["answered after all kills"] += 1

    def _start(self, command: Command) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *command.arguments.split()],
            cwd=self.home,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _finish(self, command: Command) -> tuple[int, list[str]]:
        process = self._start(command)
        _, errors = process.communicate()
        if process.returncode not in (0, 1):
            raise SystemExit(f"{command.arguments}: {errors.decode()}")
        return process.returncode, _answer(self.home / "out.json")

    def _wait_for_children(self, session: int, command: Command) -> None:
        until = time.monotonic() + MOST_SECONDS
        while members := _members(session):
            if time.monotonic() > until:
                self.counts[f"FINDING process lives on: {command.arguments}"] += 1
                for member in members:
                    os.kill(member, signal.SIGKILL)
                return
            time.sleep(0.02)

    def _check_files(self, command: Command) -> None:
        written = [self.home / "out.json", self.home / "out.xml", self.home / "memfit.lock.json"]
        stores = [path for path in (self.home / "data").rglob("*") if path.is_file()]
        for path in (*written, *stores):
            if path.name.startswith(UNFINISHED):
                # What a kill leaves of a write: never read, and removed by a later command.
                self.counts["left an unfinished temporary file"] += 1
                path.unlink()
            elif path.exists() and not _is_whole(path):
                self.counts[f"FINDING half a file: {path.name}, {command.arguments}"] += 1


def _is_whole(path: Path) -> bool:
    if path.suffix == ".xml":
        return path.read_text().rstrip().endswith("</testsuites>")
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return path.suffix != ".json"
    return True


def _answer(path: Path) -> list[str]:
    """The keys and the kinds of a report; measured figures differ between runs."""
    return sorted(json.loads(path.read_bytes())) if path.exists() else []


def _members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
