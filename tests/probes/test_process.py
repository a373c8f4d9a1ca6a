"""A model in a separate process: its memory, and the error when that process stops."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.base.errors import MachineError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.sizing.opening import size
from memfit.probes.model_runner import ModelRunner
from memfit.probes.process import ModelProcess, ProbeStopped
from tests.checkpoints import RECIPES, Checkpoints
from tests.selection import quick

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")

# Chunks that do not divide the prompt, and more tokens than the sliding window's 24.
WORKLOAD = Workload(prompt_tokens=70, max_tokens=3, prefill_step=32)
LONG = Workload(prompt_tokens=4000, max_tokens=2, prefill_step=32)
HOST = Device("this host", "cpu", 0, 0, None, "flag")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")


def started(path: Path) -> ModelProcess:
    return ModelProcess(path, timeout_seconds=60)


@pytest.fixture(scope="module")
def dense(checkpoints: Checkpoints) -> Iterator[ModelProcess]:
    """A loaded model, prompted; no test may stop it."""
    with started(checkpoints("dense")) as process:
        process.prompt(None, 100)
        process.load()
        yield process


@pytest.mark.parametrize("name", quick(RECIPES, ("dense-4bit", "sliding")))
def test_weights_caches_and_states_equal_the_estimate(name: str, checkpoints: Checkpoints) -> None:
    sized = size(open_checkpoint(str(checkpoints(name))), device=HOST)
    figures = sized.figures_for(WORKLOAD)
    with started(checkpoints(name)) as process:
        process.prompt(None, WORKLOAD.prompt_tokens)
        loaded, run = process.load(), process.run(WORKLOAD)
    assert loaded.weights_bytes == sized.footprint.loaded_bytes
    # The allocator has the weights and further arrays that the classes create.
    assert loaded.weights_bytes <= loaded.active_bytes < loaded.weights_bytes + 4096
    assert (run.kv_bytes, run.kv_held_bytes) == (figures.kv.nbytes, figures.kv.held_bytes)
    assert run.ssm_bytes == figures.ssm_bytes
    for peak in (run.prefill_peak_bytes, run.decode_peak_bytes):
        assert peak > loaded.weights_bytes + run.ssm_bytes
    assert run.first_token_ns > 0
    assert run.decode_ns > 0


def test_prefill_figures_cover_the_prompt_without_its_last_token(dense: ModelProcess) -> None:
    run = dense.run(Workload(prompt_tokens=256 + 1, max_tokens=1, prefill_step=64))
    # 3 layers x 2 heads x 2 x 64 x 2 bytes; the 257th token adds room for another 256.
    per_token = 3 * 2 * 2 * 64 * 2
    assert run.prefill_kv_bytes == run.prefill_kv_held_bytes == 256 * per_token
    assert run.kv_bytes == 512 * per_token
    assert run.kv_held_bytes == 258 * per_token


def test_a_prompt_of_one_token_has_an_empty_prefill(dense: ModelProcess) -> None:
    run = dense.run(Workload(prompt_tokens=1))
    assert run.prefill_kv_bytes == 0
    assert run.kv_bytes > 0
    assert run.decode_ns == 0


def test_a_run_leaves_nothing_behind(dense: ModelProcess) -> None:
    # The decode peak includes everything: a leaked cache would add its bytes again.
    first, *others = (dense.run(WORKLOAD) for _ in range(4))
    for run in others:
        assert run.decode_peak_bytes == pytest.approx(first.decode_peak_bytes, abs=65536)
        assert run.kv_bytes == first.kv_bytes


CACHES = {
    "quantised from the start": {"kv_bits": 8, "quantized_kv_start": 0},
    "quantised on the way": {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 40},
    "rotating": {"max_kv_size": 48},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", CACHES.values(), ids=CACHES)
def test_caches_with_every_setting_equal_the_estimate(
    settings: dict[str, Any], dense: ModelProcess, checkpoints: Checkpoints
) -> None:
    workload = Workload(prompt_tokens=70, max_tokens=3, prefill_step=32, **settings)
    estimated = (
        size(open_checkpoint(str(checkpoints("dense"))), device=HOST).figures_for(workload).kv
    )
    run = dense.run(workload)
    assert (run.kv_bytes, run.kv_held_bytes) == (estimated.nbytes, estimated.held_bytes)


def test_the_mlx_swift_lm_runtime_counts_logits_of_the_last_chunk(dense: ModelProcess) -> None:
    workload = Workload(prompt_tokens=512, prefill_step=256)
    run = dense.run(workload)
    by_swift, swift_kv = dense.call(ModelRunner.swift_workspace, workload)
    assert swift_kv >= run.prefill_kv_held_bytes * 512 // 511  # of all tokens, not all but one
    ours = run.prefill_peak_bytes - 1_190_400 - run.prefill_kv_held_bytes
    # Half of the prompt's logits in 16 bits; mlx-lm's own loop does not compute them.
    assert by_swift > ours + 256 * 320 * 2 // 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", quick(["dense", "hybrid", "sliding", "delta-net"], ["hybrid"]))
def test_caches_and_states_of_a_batch_equal_the_estimate(
    name: str, checkpoints: Checkpoints
) -> None:
    workload = replace(WORKLOAD, batch=3)
    figures, traced = (
        size(open_checkpoint(str(checkpoints(name))), device=HOST, method=m).figures_for(workload)
        for m in ("formula", "trace")
    )
    with started(checkpoints(name)) as process:
        process.prompt(None, workload.prompt_tokens)
        process.load()
        run = process.run(workload)
    assert run.ssm_bytes == figures.ssm_bytes
    # The generator copies the caches of the sequences that begin to generate. MLX's thread frees
    # a state before or after the next allocation: a trace has it after.
    assert traced.moment.decode_bytes is not None
    assert figures.moment.decode_bytes is not None
    assert 0.9 < run.decode_peak_bytes / traced.moment.decode_bytes < 1.03
    assert 0.88 < run.decode_peak_bytes / figures.moment.decode_bytes < 1.12
    # The first token cuts a rotating buffer that a chunk has filled beyond its window.
    cut = 30_720 if name == "sliding" else 0
    assert (run.prefill_kv_bytes - cut, run.kv_bytes) == (figures.kv.nbytes, figures.kv.nbytes)
    assert run.kv_held_bytes == figures.kv.held_bytes
    assert run.first_token_ns > 0
    assert run.decode_ns > 0


@pytest.mark.exhaustive(daily=True)
def test_shorter_prompts_of_a_batch_stay_until_the_longest_ends(checkpoints: Checkpoints) -> None:
    workload = replace(WORKLOAD, batch=2, prompt_tokens=300)
    path = checkpoints("dense")
    with ModelProcess(path, timeout_seconds=60, shortest_prompt=20) as process:
        process.prompt(None, workload.prompt_tokens)
        process.load()
        run = process.run(workload)
    # Both have the room of the longer one: 3 layers x 2 heads x 2 x 64 x 2 bytes for a token.
    assert run.kv_bytes == 2 * 512 * 3 * 2 * 2 * 64 * 2


def test_a_batch_has_no_quantised_caches(dense: ModelProcess) -> None:
    with pytest.raises(UnsupportedError, match="batch 2 with 4-bit KV"):
        dense.run(Workload(prompt_tokens=5, batch=2, kv_bits=4))


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal has one")
def test_a_wired_limit_is_rejected_without_metal(dense: ModelProcess) -> None:
    with pytest.raises(MachineError, match="Metal only"):
        dense.run(WORKLOAD, wired_limit_bytes=1 << 20)


def test_kv_bits_that_the_class_cannot_use_are_not_supported(checkpoints: Checkpoints) -> None:
    with started(checkpoints("sliding")) as process:
        process.prompt(None, 40)
        process.load()
        with pytest.raises(UnsupportedError, match="RotatingKVCache"):
            process.run(Workload(prompt_tokens=40, kv_bits=4, quantized_kv_start=0))
        assert process.run(WORKLOAD).kv_bytes > 0  # and the process continues


def test_a_peak_above_the_memory_limit_is_reported(checkpoints: Checkpoints) -> None:
    process = ModelProcess(checkpoints("dense"), memory_limit_bytes=1_000_000, timeout_seconds=60)
    with process, pytest.raises(ProbeStopped, match=r"memory limit of 1\.0 MB") as stopped:
        process.load()
    assert stopped.value.partial_figures["weights_bytes"] == 1_190_400


@pytest.mark.exhaustive(daily=True)
def test_a_run_above_the_memory_limit_keeps_its_figures(checkpoints: Checkpoints) -> None:
    process = ModelProcess(checkpoints("dense"), memory_limit_bytes=1_300_000, timeout_seconds=60)
    with process:
        process.prompt(None, 70)
        process.load()
        with pytest.raises(ProbeStopped, match="in this workload") as stopped:
            process.run(WORKLOAD)
    figures = stopped.value.partial_figures
    peaks = (figures["prefill_peak_bytes"], figures["decode_peak_bytes"])
    assert figures["peak_bytes"] == max(peaks) > 1_300_000
    assert figures["kv_bytes"] > 0


@pytest.fixture
def stoppable(checkpoints: Checkpoints) -> Iterator[ModelProcess]:
    """A loaded model that may be stopped."""
    with started(checkpoints("no-tokenizer")) as process:
        process.prompt(None, 100)
        process.load()
        yield process


def later(act: Callable[[], None]) -> AbstractContextManager[object]:
    """Do something during a run."""
    timer = threading.Timer(0.5, act)
    timer.start()
    return _Joined(timer)


class _Joined:
    def __init__(self, timer: threading.Timer) -> None:
        self._timer = timer

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._timer.join()


def kill(process: ModelProcess, number: signal.Signals) -> Callable[[], None]:
    assert process.pid is not None
    return lambda pid=process.pid: os.kill(pid, number)  # type: ignore[misc]


def test_a_killed_process_gives_one_line_and_the_figures_so_far(stoppable: ModelProcess) -> None:
    with later(kill(stoppable, signal.SIGKILL)), pytest.raises(ProbeStopped) as stopped:
        stoppable.run(LONG)
    assert "killed by signal 9 (SIGKILL), probably because memory ran out" in str(stopped.value)
    assert "\n" not in str(stopped.value)
    assert 0 < stopped.value.partial_figures["prompt_tokens_done"] < 4000
    with pytest.raises(ProbeStopped, match="SIGKILL"):
        stoppable.run(WORKLOAD)


@pytest.mark.exhaustive
def test_a_silent_process_is_stopped(stoppable: ModelProcess) -> None:
    stoppable.timeout_seconds = 1.5
    with later(kill(stoppable, signal.SIGSTOP)), pytest.raises(ProbeStopped) as stopped:
        stoppable.run(LONG)
    assert "no progress for 1.5 s" in str(stopped.value)
    assert stopped.value.partial_figures["prompt_tokens_done"] > 0


@pytest.mark.exhaustive
@ON_LINUX
def test_memory_refused_by_the_system_gives_a_one_line_reason(stoppable: ModelProcess) -> None:
    assert stoppable.pid is not None
    stoppable.run(WORKLOAD)  # threads need additional memory
    pages = int(Path(f"/proc/{stoppable.pid}/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + (8 << 20)
    resource.prlimit(stoppable.pid, resource.RLIMIT_AS, (room, room))
    with pytest.raises(ProbeStopped, match="memory"):
        stoppable.run(Workload(prompt_tokens=4000))


@ON_LINUX
def test_the_process_ends_with_its_parent(checkpoints: Checkpoints) -> None:
    program = (
        "import sys, pathlib; from memfit.probes.process import ModelProcess\n"
        "process = ModelProcess(pathlib.Path(sys.argv[1]), timeout_seconds=60).__enter__()\n"
        "print(process.pid, flush=True); sys.stdin.read()"
    )
    path = str(checkpoints("no-tokenizer"))
    pipe = subprocess.PIPE
    with subprocess.Popen((sys.executable, "-c", program, path), stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        child = Path(f"/proc/{int(parent.stdout.readline())}")
        assert child.exists()
        parent.kill()
    deadline = time.monotonic() + 10
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_is_left_after_the_block(checkpoints: Checkpoints) -> None:
    with started(checkpoints("no-tokenizer")) as process:
        pid = process.pid
        assert process.versions["mlx"]
        assert process.versions["backend"] in ("cpu", "metal", "cuda")
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
