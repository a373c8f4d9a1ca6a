"""``memfit estimate org/name`` as a process, with the environment that huggingface-hub reads."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.units import format_bytes
from tests.hub.conftest import NAME
from tests.hub.server import TOKEN, FakeHub, Fault

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from memfit.cli.app import main; main()"]


class Shell:
    """Runs memfit with a Hub and the test's own directories."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.directory = ROOT
        self.environment = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "XDG_CACHE_HOME": str(home / "cache"),
        }

    def __call__(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *arguments],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.directory,
        )


@pytest.fixture
def shell(hub: FakeHub, tmp_path: Path) -> Shell:
    return Shell(hub, tmp_path)


def estimate(ran: "subprocess.CompletedProcess[str]") -> Any:
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_name_is_estimated_and_only_the_answer_is_printed(
    shell: Shell, hub: FakeHub, model: Path
) -> None:
    ran = shell("estimate", NAME, "--json")
    assert ran.stderr == ""
    data = estimate(ran)
    assert (data["model"]["id"], data["model"]["source"]) == (NAME, "hub")
    assert data["model"]["revision"] == hub.repos[NAME].commit
    local = estimate(shell("estimate", str(model), "--json"))
    assert data["components"] == local["components"]


def test_the_token_and_the_cache_folder_are_those_of_hugging_face(
    shell: Shell, hub: FakeHub, tmp_path: Path
) -> None:
    hub.repos[NAME].private = True
    refused = shell("estimate", NAME)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (4, "", 1)
    assert estimate(shell("estimate", NAME, "--json", HF_TOKEN=TOKEN))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(f"{TOKEN}\n")
    assert estimate(shell("estimate", NAME, "--json"))


@pytest.mark.parametrize(
    ("name", "fault", "code"),
    # What each fault is, the other tests of this folder say without a process.
    [
        ("org/gone", None, 4),
        (NAME, Fault("signature", "garbage"), 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (f"{NAME}@v9", None, 2),
                (NAME, Fault("/api/", "status", 403), 4),
                (NAME, Fault("/api/", "status", 429, {"Retry-After": "600"}), 4),
                (NAME, Fault("/resolve/", "status", 500, {"Retry-After": "0"}), 4),
                (NAME, Fault("/api/", "garbage"), 4),
                (NAME, Fault("signature", "drop"), 4),
            )
        ),
    ],
)
def test_a_fault_gives_a_one_line_error_and_its_exit_code(
    shell: Shell, hub: FakeHub, name: str, fault: Fault | None, code: int
) -> None:
    hub.faults = [fault] if fault else []
    ran = shell("estimate", name)
    assert (ran.returncode, ran.stdout) == (code, ""), ran.stderr
    assert ran.stderr.startswith(f"memfit: {name.partition('@')[0]}")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_ENDPOINT", "https://user:secret@127.0.0.1"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc"),
        ("ALL_PROXY", "garbage://x"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive(daily=True))
            for case in (
                ("HF_ENDPOINT", ""),
                ("HF_ENDPOINT", "huggingface.co"),
                ("HF_ENDPOINT", "ftp://host"),
                ("HF_ENDPOINT", "http://["),
                ("HF_ENDPOINT", "http://127.0.0.1:99999"),
                ("HF_HUB_DOWNLOAD_TIMEOUT", "99999999999999"),
                ("HF_HUB_DOWNLOAD_TIMEOUT", "-1"),
                ("ALL_PROXY", "socks5://127.0.0.1:1"),
                ("SSL_CERT_FILE", "/nothere"),
            )
        ),
    ],
)
def test_an_unusable_setting_is_reported_as_bad_input(
    shell: Shell, hub: FakeHub, name: str, value: str
) -> None:
    ran = shell("estimate", NAME, **{name: value})
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert name in ran.stderr
    assert "secret" not in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert hub.made == []


def test_the_connection_that_a_program_gave_huggingface_hub_is_used(
    shell: Shell, hub: FakeHub
) -> None:
    given = """
import httpx2
from huggingface_hub import set_client_factory
set_client_factory(lambda: httpx2.Client(headers={"x-given": "yes"}))
from memfit.cli.app import main
main()
"""
    command = [sys.executable, "-c", given, "estimate", NAME]
    ran = subprocess.run(command, env=shell.environment, capture_output=True, timeout=60, cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert {made.headers.get("x-given") for made in hub.made} == {"yes"}


@pytest.mark.parametrize("where", ["/api/", "signature"])
def test_an_interrupt_does_not_wait_for_a_stalled_hub(
    shell: Shell, hub: FakeHub, where: str
) -> None:
    hub.faults = [Fault(where, "stall")]
    with subprocess.Popen(
        [*COMMAND, "estimate", NAME],
        env={**shell.environment, "HF_HUB_DOWNLOAD_TIMEOUT": "600"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        while not any(where in made.path for made in hub.made):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "memfit: interrupted\n")


@pytest.mark.exhaustive(daily=True)
def test_offline_uses_the_previous_call_with_a_note(shell: Shell, hub: FakeHub) -> None:
    first = estimate(shell("estimate", NAME, "--json"))
    hub.made.clear()
    second = estimate(shell("estimate", NAME, "--json", HF_HUB_OFFLINE="1"))
    assert hub.made == []
    notes = [note["message"] for note in second.pop("notes")]
    assert any("HF_HUB_OFFLINE is set; this is commit" in note for note in notes)
    first.pop("notes")
    assert second == first


@pytest.mark.exhaustive(daily=True)
def test_verbose_prints_each_request_and_response(shell: Shell, hub: FakeHub) -> None:
    ran = shell("estimate", NAME, "--json", "-v")
    assert estimate(ran)
    lines = ran.stderr.splitlines()
    assert len(lines) == len(hub.made) + 1 == 11
    assert all(line.startswith("memfit: GET http://127.0.0.1:") for line in lines[:-1])
    assert lines[-1] == f"memfit: 10 requests, {format_bytes(hub.sent())}"
    assert "no" not in shell("estimate", NAME, "-v").stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("latency", "bar"), [(0.4, True), pytest.param(0.0, False, marks=pytest.mark.exhaustive)]
)
def test_a_terminal_shows_progress_after_half_a_second(
    shell: Shell, hub: FakeHub, latency: float, bar: bool
) -> None:
    hub.latency_seconds = latency
    ours, theirs = pty.openpty()
    environment = {**shell.environment, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [*COMMAND, "estimate", NAME, "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=ROOT,
    ) as process:
        os.close(theirs)
        shown = b"".join(iter(partial(_piece, ours), b""))
        answer = process.communicate(timeout=60)[0]
    os.close(ours)
    assert json.loads(answer)["model"]["source"] == "hub"
    assert (b"Reading org/name" in shown) is bar


_TWO_WORKS = """
import sys, time
from memfit.cli.progress import TerminalProgress
before = sys.stdout
progress = TerminalProgress(verbose=False)
for _ in range(2):
    progress.begin("Reading", 1)
    time.sleep(0.8)
progress.end()
print(sys.stdout is before)
"""


def test_no_second_bar_keeps_standard_output_from_the_first() -> None:
    ours, theirs = pty.openpty()
    ran = subprocess.run(
        [sys.executable, "-c", _TWO_WORKS], stdout=subprocess.PIPE, stderr=theirs, timeout=60
    )
    os.close(theirs)
    os.close(ours)
    assert ran.stdout == b"True\n"


def _piece(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux reports this when the other side is closed
        return b""


@pytest.mark.exhaustive(daily=True)
def test_the_cache_is_shown_and_cleared(shell: Shell, tmp_path: Path) -> None:
    assert "0 entries, 0 B; at most 256.0 MB" in shell("cache", "info").stdout
    estimate(shell("estimate", NAME, "--json"))
    folder, amount = shell("cache", "info").stdout.splitlines()
    assert Path(folder).is_relative_to(tmp_path)
    assert amount.startswith("6 entries, ")
    assert shell("cache", "clear").stdout.endswith("; removed\n")
    assert list(Path(folder).iterdir()) == []


@pytest.mark.exhaustive(daily=True)
def test_models_on_the_hub_are_compared_and_gated(
    shell: Shell, hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    ran = shell("compare", NAME, str(model), "--json", "-v")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith(f"10 requests, {format_bytes(hub.sent())}\n")
    policy = tmp_path / "memfit.yaml"
    policy.write_text(
        f"schema: memfit.policy/1\ntargets:\n  chat: {{hub: {NAME}, device: m4-max-64,"
        " workload: {context: 4k}, limits: {peak: 90%}}\n"
    )
    ran = shell("gate", "--policy", str(policy), "-v")
    assert ran.stderr.splitlines()[-1].startswith("memfit: 1 request, "), ran.stderr
