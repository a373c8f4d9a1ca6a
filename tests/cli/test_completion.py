"""Completion in real shells: bash, and where they are installed zsh and fish."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.selection import quick
from tests.test_imports import HEAVY

ATTEMPTS = 10
QUIET_SECONDS = 5.0
TYPED = [
    ("memfit devi", "devices"),
    ("memfit phi-4-m", "phi-4-mini"),
    ("memfit estimate --model phi-4-m", "phi-4-mini"),
    ("memfit x --device m4-max-12", "m4-max-128"),
    ("memfit x --runtime vl", "vllm"),
    ("memfit gate init x --device m4-max-12", "m4-max-128"),
    ("memfit plan server --ctx-s", "--ctx-size"),
    ("memfit --vers", "--version"),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home, with memfit on the path."""
    program = tmp_path / "bin" / "memfit"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom memfit.cli.__main__ import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / ".zshrc").touch()
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    return {"HOME": str(home), "PATH": path, "TERM": "xterm", "LANG": "C.UTF-8"}


class Terminal:
    """A shell that a person types into."""

    def __init__(self, shell: str, home: Path) -> None:
        self.process, self.keys = pty.fork()
        if not self.process:
            os.chdir(home)
            os.execvpe(shell, [shell, "-i"], environment(home))
        self.seen = b""

    def type(self, text: str, *, until: str) -> None:
        """Type a text, again where nothing comes, and wait for what is to appear after it.

        zsh loads the function of a completion with the first Tab, and completes with the next.
        """
        self.seen = b""
        for _ in range(ATTEMPTS):
            os.write(self.keys, text.encode())
            while select.select([self.keys], [], [], QUIET_SECONDS)[0]:
                # Of several candidates bash completes what is common to them, with a bell inside.
                self.seen = (self.seen + os.read(self.keys, 65536)).replace(b"\a", b"")
                if until.encode() in self.seen:
                    return
        raise AssertionError(f"{text!r} gives {self.seen!r}, and no {until!r}")

    def close(self) -> None:
        """End the shell."""
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.keys)


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    """The name of an installed shell."""
    name = str(request.param)
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed: its completion is NOT tested")
    return name


@pytest.fixture
def open_terminals() -> Iterator[list[Terminal]]:
    """Terminals that are closed after the test."""
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


@pytest.mark.exhaustive
def test_an_installed_completion_completes_what_is_typed(
    shell: str, home: Path, open_terminals: list[Terminal]
) -> None:
    first = Terminal(shell, home)
    open_terminals.append(first)
    first.type("echo be''gin\r", until="begin")
    first.type("memfit --install-completion\r", until="will take effect")
    second = Terminal(shell, home)
    open_terminals.append(second)
    second.type("echo be''gin\r", until="begin")
    for typed, completed in TYPED:
        second.type(f"\x15{typed}\t", until=completed)


@pytest.mark.parametrize(("typed", "completed"), quick(TYPED, TYPED[:2]))
def test_bash_completes_what_is_typed(home: Path, typed: str, completed: str) -> None:
    words = typed.split()
    script = (
        f'eval "$(_MEMFIT_COMPLETE=source_bash memfit)"; COMP_WORDS=({typed});'
        f" COMP_CWORD={len(words) - 1}; _memfit_completion memfit; echo ${{COMPREPLY[@]}}"
    )
    ran = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment(home), capture_output=True, text=True
    )
    assert completed in ran.stdout.split(), ran


@pytest.mark.parametrize(
    "typed", ["memfit ", "memfit gate ", "memfit cache ", "memfit plan server --"]
)
def test_a_completion_imports_nothing_heavy(typed: str) -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from memfit.cli.__main__ import main\nmain()"
    )
    asked = {"_MEMFIT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed}
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert ran.stdout.startswith("_arguments"), ran
    assert {name.split(".")[0] for name in ran.stderr.split()} & HEAVY == set()
