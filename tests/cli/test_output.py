"""Output files: complete, and with the permissions of a plain write."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.cli.render.output import write_whole
from memfit.estimators.base.errors import InputError
from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_config
from tests.selection import quick


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    write_whole(tmp_path / "report.md", "text")
    assert stat.S_IMODE((tmp_path / "report.md").stat().st_mode) == 0o644


def test_an_existing_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text("old")
    path.chmod(0o640)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link.md").symlink_to(tmp_path / "report.md")
    write_whole(tmp_path / "link.md", "text")
    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "report.md").read_text() == "text"


def test_a_device_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    # A pipe instead of /dev/null, which root could replace with a file.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_directory_cannot_be_written_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory; give a file name"):
        write_whole(tmp_path, "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("memory", "code"), [("8GB", 1), ("64GB", 0)])
def test_a_process_ends_with_its_whole_output_and_code_after_exit_functions(
    memory: str, code: int
) -> None:
    script = """
import atexit
from memfit.cli import app
from memfit.cli.__main__ import main
run = app.main
app.main = lambda: (atexit.register(print, "last words"), run())
main()
"""
    command = [sys.executable, "-c", script, "estimate", "qwen3-8b-4bit", "--memory", memory]
    # A pipe is written in blocks: the last one is flushed at the end.
    run = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    answer, _, words = run.stdout.rpartition("\n}\n")
    assert (run.returncode, words, run.stderr) == (code, "last words\n", "")
    assert json.loads(answer + "}")["schema"].startswith("memfit.estimate/")


def _run(
    *arguments: str | Path, stdout: int, command: str = "estimate", **environment: str
) -> subprocess.CompletedProcess[str]:
    code = "from memfit.cli.app import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *command.split(), *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="ascii",
        env={**os.environ, **environment},
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("form", quick(["table", "json", "yaml", "markdown"], ("table", "json")))
def test_an_ascii_terminal_gets_every_format_in_ascii(tmp_path: Path, form: str) -> None:
    directory = tmp_path / "héllo"
    directory.mkdir()
    model = write_config(directory, QWEN3_4B)
    options = ("--format", form, "--plot", "--memory", "8GB")
    run = _run(model, *options, stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (run.returncode in (0, 1), run.stderr) == (True, "")
    assert run.stdout.isascii()
    if form == "json":
        assert json.loads(run.stdout)["model"]["id"] == str(model)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_gives_a_one_line_error(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        run = _run(write_config(tmp_path, QWEN3_4B), stdout=full.fileno())
    assert run.returncode == 2
    assert run.stderr == "memfit: standard output: cannot be written: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
@pytest.mark.parametrize("command", ["--help", "gate check --help", "--version", "devices"])
def test_a_full_disk_gives_a_one_line_error_in_every_command(command: str) -> None:
    with open("/dev/full", "w") as full:  # PYTHONUNBUFFERED would leave no output to fail at exit
        run = _run(command=command, stdout=full.fileno(), PYTHONUNBUFFERED="")
    assert run.returncode == 2
    assert run.stderr.startswith("memfit: standard output")
    assert run.stderr.endswith("cannot be written: No space left on device\n")
    assert run.stderr.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="a shell closes the stream")
@pytest.mark.parametrize(("model", "code"), [("", 0), ("./nowhere", 2)])
def test_without_standard_error_the_answer_is_the_same(model: str, code: int) -> None:
    run = 'exec "$0" -c "from memfit.cli.app import main; main()" estimate $1 -v 2>&-'
    shell = subprocess.run(
        ["sh", "-c", run, sys.executable, model], capture_output=True, check=False, timeout=60
    )
    assert shell.returncode == code
    assert (b"memfit:" in shell.stdout, bool(shell.stdout)) == (False, code == 0)


@pytest.mark.parametrize("options", [["--plot"], ["--plot", "--method", "trace"]])
def test_the_width_of_a_terminal_is_limited(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    if "trace" in options:
        pytest.importorskip("mlx_lm")
    model = write_config(tmp_path, QWEN3_4B)
    monkeypatch.setenv("COLUMNS", "1000000")
    run = memfit("estimate", model, "--device", "m4-pro-24", *options)
    assert max(map(len, run.out.splitlines())) <= 1000


@pytest.mark.skipif(os.name == "nt", reason="a shell closes the stream")
@pytest.mark.parametrize("encoding", quick(["utf-8", "ascii"], ("utf-8",)))
@pytest.mark.parametrize("end", ["| true", ">&-"])
@pytest.mark.parametrize(
    ("command", "code"),
    quick(
        [
            ("--help", 0),
            ("gate check --help", 0),
            ("plan --help", 0),
            ("--version", 0),
            ("devices", 0),
            ("estimate --memory 128GB", 0),
            ("estimate model --memory 8GB", 1),
            ("gate", 0),
            ("gate --format markdown", 0),
        ],
        {("plan --help", 0), ("estimate model --memory 8GB", 1)},
    ),
)
def test_the_exit_code_is_the_verdicts_whatever_happens_to_the_output(
    memfit: Memfit, command: str, end: str, code: int, encoding: str
) -> None:
    model = write_config(Path("model"), QWEN3_4B)
    memfit("gate", "init", model, "--device", "m4-pro-24")
    assert memfit("gate", "--update").code == 0
    run = f'"$0" -c "from memfit.cli.app import main; main()" {command} {end}'
    shell = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {run}", sys.executable],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        text=True,
        check=False,
        timeout=60,
    )
    assert (shell.returncode, shell.stderr) == (code, "")


def test_a_file_name_that_is_too_long_is_one_line(memfit: Memfit) -> None:
    run = memfit("estimate", "-o", "x" * 256 + ".json")
    assert run.code == 2
    assert run.err.endswith("cannot be written: File name too long\n")


@pytest.mark.parametrize(("memory", "code"), [("64GB", 0), ("8GB", 1)])
def test_a_closed_pipe_does_not_change_the_verdict(tmp_path: Path, memory: str, code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    model = write_config(tmp_path, QWEN3_4B)
    run = _run(model, "--memory", memory, stdout=writer)
    os.close(writer)
    assert (run.returncode, run.stderr) == (code, "")


def test_the_suffix_of_the_file_chooses_the_format(memfit: Memfit, tmp_path: Path) -> None:
    starts = {"json": "{", "yaml": "schema:", "md": "## ", "txt": "Qwen3-4B-4bit: needs"}
    starts["csv"] = "settings,weights_bytes,memory_bytes,verdict,needed_bytes,prefill_step,reason"
    for suffix, start in starts.items():
        assert memfit("estimate", "-o", tmp_path / f"it.{suffix}").code == 0
        assert (tmp_path / f"it.{suffix}").read_text().startswith(start)
    run = memfit("estimate", "-o", tmp_path / "it.xml")
    assert (run.code, run.out) == (2, "")
    assert "no format has this suffix; use .txt, .json" in run.err
    assert memfit("estimate", "--format", "markdown", "-o", tmp_path / "it.xml").code == 0
