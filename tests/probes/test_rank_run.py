"""Real ranks under mlx.launch on this machine; a rank that fails ends the run and is named."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

pytest.importorskip("mlx_lm", reason="the ranks are mlx-lm's")

from memfit.estimators.base.errors import CheckpointError, InputError, UnsupportedError
from memfit.estimators.base.progress import FinishedRequest
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.questions.target import Ranks
from memfit.probes.experiments.ranks import RankTune, RankTuneRequest, tune_ranks
from memfit.probes.preflight import RefusedError
from memfit.probes.rank_run import RankRequest, RankStopped, measure_ranks
from tests.checkpoints import Recipe, save_checkpoint

WORKLOAD = Workload(prompt_tokens=70, max_tokens=3, prefill_step=64)
ENDLESS = Workload(prompt_tokens=70, max_tokens=10**6)
# Runs a command on this machine, with a terminal of its own as `ssh -tt` gives it one.
SSH = f"""#!{sys.executable}
import os, pty, sys, time
host, command = sys.argv[-2:]
if host == "asleep":
    time.sleep(600)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["/bin/bash", "-c", command])))
"""
PATIENCE_SECONDS = 60


class Acting:
    """Calls something once the ranks together have done a number of stages."""

    def __init__(self, stages: int, act: Callable[[], None]) -> None:
        self._left, self._act = stages, act

    def begin(self, what: str, steps: int) -> None: ...
    def end(self) -> None: ...
    def request(self, request: FinishedRequest) -> None: ...

    def advance(self, steps: int = 1) -> None:
        """Count the stages."""
        before, self._left = self._left, self._left - steps
        if before > 0 >= self._left:
            self._act()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "llama"
    save_checkpoint(path, Recipe("llama"))
    return path


def asked(path: Path, workload: Workload = ENDLESS, **options: object) -> RankRequest:
    values = {"size": 2, "parallel": "tensor", "split": None, "timeout_seconds": 240.0, **options}
    return convert({"path": path, "workload": workload, **values}, RankRequest)


def ranks_of(path: Path) -> dict[int, int]:
    """Return the processes of ranks that run a model, by rank."""
    # With their environment, which both Linux and macOS print after the arguments.
    listed = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True)
    return {
        int(rank[1]): int(line.split()[0])
        for line in listed.stdout.splitlines()
        if "memfit.probes.rank_child" in line
        and str(path) in line
        and (rank := re.search(r"\bMLX_RANK=(\d+)", line))
    }


def require_none_left(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while ranks_of(path):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)


def request_of(path: Path, ranks: Ranks, **settings: Any) -> RankTuneRequest:
    checkpoint, limits = open_checkpoint(str(path)), {"timeout_seconds": 240.0, **settings}
    return RankTuneRequest(
        checkpoint=checkpoint, path=path, workload=WORKLOAD, ranks=ranks, **limits
    )


def require_exact(result: RankTune) -> None:
    for rank in result.ranks:
        assert rank.loaded.weights_bytes == rank.estimated.weights_bytes
        assert rank.run.kv_bytes == rank.estimated.kv_bytes
        assert rank.run.ssm_bytes == rank.estimated.state_bytes


def hostfile(folder: Path, *names: str) -> Path:
    file = folder / "hosts.json"
    hosts = [{"ssh": name, "ips": ["127.0.0.1"], "memory": "64GB"} for name in names]
    file.write_text(json.dumps({"backend": "ring", "hosts": hosts}))
    return file


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `mlx.launch` find a program named ssh that reaches this machine by any name."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "parallel", "size", "split"),
    [("qwen2", "pipeline", 2, (1, 2)), ("deepseek_v3", "pipeline", 3, None)],
)
def test_weights_and_caches_of_every_rank_are_as_estimated(
    tmp_path: Path, case: str, parallel: Parallel, size: int, split: tuple[int, ...] | None
) -> None:
    path = tmp_path / case
    save_checkpoint(path, Recipe(case, bits=8 if "_" in case else None))
    result = tune_ranks(request_of(path, Ranks(size, parallel, split)))
    assert len(result.ranks) == size
    require_exact(result)
    require_none_left(path)


@pytest.mark.exhaustive
def test_a_killed_rank_is_named(llama: Path) -> None:
    def kill() -> None:
        os.kill(ranks_of(llama)[1], signal.SIGKILL)

    # Once both are started, connected and loaded.
    with pytest.raises(RankStopped, match=r"^rank 1: killed by signal 9 \(SIGKILL\)"):
        measure_ranks(asked(llama), Acting(6, kill))
    require_none_left(llama)


@pytest.mark.exhaustive
def test_a_stopped_rank_is_named(llama: Path) -> None:
    def stop() -> None:
        os.kill(ranks_of(llama)[1], signal.SIGSTOP)

    with pytest.raises(RankStopped, match=r"^rank 1: stopped by a signal; the run is ended"):
        measure_ranks(asked(llama), Acting(4, stop))
    require_none_left(llama)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ssh")
def test_a_rank_that_does_not_start_is_named_after_the_time_limit(
    llama: Path, tmp_path: Path
) -> None:
    hosts = hostfile(tmp_path, "127.0.0.1", "asleep")
    with pytest.raises(RankStopped, match=r"^rank 1: did not start for 5 s; the run is ended"):
        measure_ranks(asked(llama, hostfile=hosts, timeout_seconds=5.0))
    require_none_left(llama)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ssh")
def test_ranks_run_on_the_hosts_of_a_file_and_one_that_cannot_connect_is_named(
    llama: Path, tmp_path: Path
) -> None:
    hosts = hostfile(tmp_path, "127.0.0.1", "localhost")
    ranks = Ranks(2, "tensor", None, (None, None))
    require_exact(tune_ranks(request_of(llama, ranks, hostfile=hosts)))
    require_none_left(llama)
    # Of the first rank: mlx.launch counts the ports from it.
    taken = socket.create_server(("127.0.0.1", 32323))
    with taken, pytest.raises(RankStopped, match=r"^rank 0: it cannot connect: .*bind"):
        measure_ranks(asked(llama, hostfile=hosts))
    require_none_left(llama)


@pytest.mark.exhaustive
def test_a_rank_without_memory_is_named(llama: Path) -> None:
    with pytest.raises(RankStopped, match=r"rank [01]: MLX took .* more than the memory limit"):
        measure_ranks(asked(llama, WORKLOAD, memory_limit_bytes=700_000))
    require_none_left(llama)


@pytest.mark.exhaustive
def test_a_host_without_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank [01]: .*no such directory on this host"):
        measure_ranks(asked(tmp_path / "none", WORKLOAD))


def test_ranks_are_checked_before_any_is_started(llama: Path, tmp_path: Path) -> None:
    def run(ranks: Ranks, **settings: Any) -> RankTune:
        return tune_ranks(request_of(llama, ranks, timeout_seconds=1.0, **settings))

    with pytest.raises(UnsupportedError, match="has no pipeline"):
        run(Ranks(2, "pipeline"))
    with pytest.raises(RefusedError, match=r"llama: 2 ranks on this machine: estimated to need 2"):
        run(Ranks(2, "tensor"), margin_bytes=10**12)
    (tmp_path / "hosts.json").write_text('[{"ssh": "a"}, {"ssh": "b"}]')
    hosts = partial(run, Ranks(2, "tensor", None, (None, None)), hostfile=tmp_path / "hosts.json")
    with pytest.raises(InputError, match=r"hosts\[0\]\.ips: the ring needs an address"):
        hosts()
    for variable in ("PYTHONPATH=/shared", "LD_PRELOAD=x.so", "MLX_", 1):
        content = {"hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}], "envs": [variable]}
        (tmp_path / "hosts.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match="envs: expected settings of MLX"):
            hosts()
