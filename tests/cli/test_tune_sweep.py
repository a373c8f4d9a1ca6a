"""Sweeps on real models: every combination, stopped at any moment, continued where they stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
pytestmark = pytest.mark.usefixtures("home")
SHORT = ("--prompt-tokens", "70", "--prefill-step", "32", "--max-tokens", "3")
# Points long enough to be interrupted; no tokenizer, so that a process starts soon.
LONG = ("--prompt-tokens", "300", "--prefill-step", "16", "--max-tokens", "3")
LONG_SWEEP = ("--sweep", "context=301,302,303,304,305")
PATIENCE_SECONDS = 60


@pytest.fixture
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints("no-tokenizer")


def test_every_combination_is_measured_or_skipped_if_it_cannot_fit(
    memfit: Memfit, model: Path, home: Path
) -> None:
    sweep = ("--sweep", "prefill-step=16,32", "--sweep", "context=64,70,900k")
    run = memfit("tune", model, *SHORT, *sweep, "--json")
    assert run.code == 0, run.err
    points = run.json["points"]
    settings = [(p["workload"]["prompt_tokens"], p["workload"]["prefill_step"]) for p in points]
    # The given values come first, and once.
    assert settings == [(70, 32), (64, 16), (70, 16), (921600, 16), (64, 32), (921600, 32)]
    assert Counter(point["status"] for point in points) == {"measured": 4, "skipped": 2}
    for point in points:
        skipped = point["workload"]["prompt_tokens"] == 921600
        assert (
            "more than the model's own limit of 4096 tokens" in (point["reason"] or "")
        ) == skipped
        assert (point["peak_bytes"] is None) == skipped
        assert point["estimated_peak_bytes"] > 0
    assert len(list((home / "measurements").iterdir())) == 4
    assert not list((home / "sweeps").iterdir())


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_sweep_is_kept_until_its_report_is_written(
    memfit: Memfit, model: Path, home: Path
) -> None:
    sweep = ("--sweep", "prefill-step=16,32", "--json")
    assert memfit("tune", model, *SHORT, *sweep, "-o", "/dev/full").code == 2
    assert len(list((home / "sweeps").iterdir())) == 1
    run = memfit("tune", model, *SHORT, *sweep)
    assert "resumed" in [note["code"] for note in run.json["notes"]]
    assert not list((home / "sweeps").iterdir())


@pytest.mark.exhaustive
def test_swept_bits_apply_to_the_cache_from_its_first_token(memfit: Memfit, model: Path) -> None:
    run = memfit("tune", model, *SHORT, "--sweep", "kv-bits=none,8,4", "--json")
    held = {
        point["workload"]["kv_bits"]: figure["measured_bytes"]
        for point in run.json["points"]
        for figure in point["figures"]
        if figure["name"] == "kv"
    }
    # A quarter of 16 bits and the scales and biases of the groups.
    assert held[None] > held[8] > held[4] > held[None] // 4
    assert {point["workload"]["quantized_kv_start"] for point in run.json["points"]} == {0, 5000}


@pytest.mark.exhaustive
def test_an_interrupted_sweep_continues_and_survives_a_killed_process(
    model: Path, home: Path
) -> None:
    with started(model) as run:
        until(run, lambda: measurements(home) >= 2)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert (run.returncode, json.loads(out)["exit_code"]) == (130, 130)
    counted = re.search(r"(\d) of 6 points are measured and saved; the same command continues", err)
    assert counted
    # A point that was being saved at the signal is measured again.
    assert measurements(home) - 1 <= int(counted[1]) <= measurements(home)
    assert len(list((home / "sweeps").iterdir())) == 1
    before = times(home)

    with started(model) as run:
        until(run, lambda: times(home).keys() > before.keys())
        (child,) = children(run.pid)
        os.kill(child, signal.SIGKILL)
        out, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 5, err
    assert "1 of 6 points failed" in err
    result = json.loads(out)
    assert Counter(point["status"] for point in result["points"]) == {"measured": 5, "failed": 1}
    (reason,) = (point["reason"] for point in result["points"] if point["reason"])
    assert "killed by signal 9" in reason
    assert f"{counted[1]} of 6 points were measured before" in json.dumps(result["notes"])
    assert len(before.items() & times(home).items()) >= int(counted[1])
    before = times(home)

    with started(model) as run:
        out, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 0, err
    assert "5 of 6 points were measured before" in out
    assert before.items() <= times(home).items()
    assert not list((home / "sweeps").iterdir())


@pytest.mark.exhaustive
def test_a_terminated_sweep_reports_it_and_leaves_no_process(model: Path, home: Path) -> None:
    with started(model) as run:
        until(run, lambda: measurements(home) >= 1)
        (child,) = children(run.pid)
        run.terminate()
        out, err = run.communicate(timeout=PATIENCE_SECONDS)
        assert not is_alive(child)
    assert (run.returncode, json.loads(out)["exit_code"]) == (143, 143)
    assert "of 6 points are measured and saved" in err
    assert len(list((home / "sweeps").iterdir())) == 1


@pytest.mark.exhaustive
def test_a_killed_sweep_can_be_continued_and_leaves_no_process(model: Path, home: Path) -> None:
    with started(model) as run:
        until(run, lambda: measurements(home) >= 2)
        (child,) = children(run.pid)
        run.kill()
        run.communicate(timeout=PATIENCE_SECONDS)
    until(None, lambda: not is_alive(child))
    before = times(home)
    with started(model) as run:
        out, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 0, err
    counted = re.search(r"(\d) of 6 points were measured before", out)
    assert counted
    assert len(before) - 1 <= int(counted[1]) <= len(before)
    assert len(before.items() & times(home).items()) >= int(counted[1])


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        (["margin=1"], ["--sweep: margin=1: not a sweep", "kv-bits=none,8,4"]),
        (["kv-bits=7"], ["--sweep: kv-bits: 7", "none, 2, 3, 4, 5, 6, 8"]),
        (["context=1k", "context=2k"], ["context: given twice"]),
    ],
)
def test_a_bad_sweep_gives_a_one_line_error(
    memfit: Memfit, model: Path, sweep: list[str], words: list[str]
) -> None:
    options = [word for text in sweep for word in ("--sweep", text)]
    assert_one_line(memfit("tune", model, *SHORT, *options), 2, *words)


def test_a_sweep_without_room_for_any_point_is_rejected(
    memfit: Memfit, model: Path, home: Path
) -> None:
    run = memfit("tune", model, *SHORT, "--sweep", "context=64", "--margin", "100TB")
    assert_one_line(run, 5, "estimated to need 100.1 TB", "--force")
    assert not home.exists()


@pytest.mark.exhaustive
def test_a_reason_shared_by_points_is_printed_once(memfit: Memfit, model: Path) -> None:
    run = memfit("tune", model, *SHORT, "--sweep", "context=70,500k,600k,700k")
    assert run.code == 0, run.err
    text = " ".join(run.out.split())  # lines are wrapped
    assert "512000 tokens, prefill step 32, unquantised KV cache and 2 more: skipped" in text
    assert text.count("more than the model's own limit of 4096 tokens") == 1


@pytest.mark.exhaustive
def test_results_that_cannot_be_saved_are_still_shown(
    memfit: Memfit, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMFIT_HOME", str(tmp_path / "file" / "home"))
    run = memfit("tune", model, *SHORT, "--sweep", "context=64", "--json")
    assert run.code == 0, run.err
    assert {point["status"] for point in run.json["points"]} == {"measured"}
    assert {point["measurement_id"] for point in run.json["points"]} == {None}
    (note,) = (note["message"] for note in run.json["notes"] if note["code"] == "not-kept")
    assert "cannot be written" in note


@pytest.mark.exhaustive
def test_a_plot_shows_every_setting_against_context_and_speed(memfit: Memfit, model: Path) -> None:
    sweep = ("--sweep", "prefill-step=16,32", "--sweep", "context=64,128", "--plot")
    run = memfit("tune", model, *SHORT, *sweep)
    assert run.code == 0, run.err
    plot = run.out.partition("Memory against context")[2].splitlines()
    assert "a  prefill step 32, unquantised KV cache" in plot
    assert "b  prefill step 16, unquantised KV cache" in plot
    rows = [line.split() for line in plot if " tokens " in line and " MB " in line]
    assert {row[0] for row in rows} >= {"64", "70", "128"}
    assert {row[1] for row in rows if row[0] in ("64", "70", "128")} == {"tokens"}
    longest = max(len(row[4]) for row in rows if len(row) == 5)
    assert longest > 20
    assert "Prefill, tokens/s against memory" in run.out
    assert "Decode, tokens/s against memory" in run.out


@pytest.mark.exhaustive
def test_a_wired_limit_is_simulated_where_it_is_not_supported(memfit: Memfit, model: Path) -> None:
    run = memfit("tune", model, *SHORT, "--wired", "--json")
    assert run.code == 0, run.err
    if run.json["device"]["backend"] == "metal":
        pytest.skip("here there is one")
    recommendation = run.json["recommendation"]
    advice = recommendation["wired_limit_bytes"]
    assert "the cpu backend has no wired limit, nothing was set" in advice["reason"]
    active = run.json["loaded"]["active_bytes"]
    assert advice["value"] > active + run.json["margin_bytes"]
    assert {point["wired_limit_bytes"] for point in run.json["points"]} == {None}


@contextmanager
def started(model: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", "from memfit.cli.app import main; main()", "tune", str(model)]
    pipe = subprocess.PIPE
    arguments = [*command, *LONG, *LONG_SWEEP, "--json"]
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True) as run:
        try:
            yield run
        finally:
            run.kill()


def until(run: "subprocess.Popen[str] | None", holds: Any) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert run is None or run.poll() is None, run.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def measurements(home: Path) -> int:
    return len(times(home))


def times(home: Path) -> dict[str, int]:
    """When each measurement was written; a repeated one is newer."""
    return {path.name: path.stat().st_mtime_ns for path in (home / "measurements").glob("*.json")}


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = (map(int, line.split()) for line in listed.stdout.splitlines())
    return [child for child, parent in pairs if parent == pid]


def is_alive(pid: int) -> bool:
    asked = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return asked.stdout.strip()[:1] not in ("", "Z")  # a zombie has ended
