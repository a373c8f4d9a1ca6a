"""``memfit serve``: a real mlx_lm.server, which stays below its limit and says why it refuses."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("mlx_lm")

from tests.plans.test_real_server import CONFIG, STATES, WINDOWS, saved

PATIENCE_SECONDS = 300
LIMIT = 40_000_000
CONFIGS = {"llama": CONFIG, "windows": WINDOWS, "states": STATES}


class Answer(NamedTuple):
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Serving:
    """A running memfit serve."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{port}"

    def health(self) -> Any:
        return self.get("/health").json

    def get(self, path: str) -> Answer:
        return _answer(urllib.request.Request(self.url + path))

    def wait(self) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self.health()["active_bytes"] > 10**6:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        pytest.fail("the server did not start")

    def post(self, prompt: int, reply: int, **more: Any) -> Answer:
        """Send a prompt of random digits, one token each."""
        text = "".join(random.Random(prompt).choices("0123456789", k=prompt))
        body = {"prompt": text, "max_tokens": reply, "logit_bias": {"1": -100}, **more}
        return _answer(
            urllib.request.Request(
                f"{self.url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
        )

    def child(self) -> int:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(listed.stdout.split()[0])


def _answer(request: urllib.request.Request) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as found:
            return Answer(found.status, found.headers, found.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read().decode())


@contextmanager
def serving(model: Path, *flags: str, limit: int = LIMIT) -> Iterator[Serving]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "memfit", "serve", str(model), "--limit", f"{limit}B"]
    settings = ["--port", str(port), "--prefill-step-size", "256", *flags]
    with subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True) as process:
        try:
            server = Serving(process, port)
            server.wait()
            yield server
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("guarded")
    return {name: saved(folder / name, config, chats=True) for name, config in CONFIGS.items()}


def burst(server: Serving, seed: int, count: int) -> list[Answer]:
    """Send requests of mixed lengths, some of them with the beginning of others."""
    chosen = random.Random(seed)
    requests = [(chosen.choice((9, 60, 200, 500)), chosen.choice((1, 8, 24))) for _ in range(count)]
    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(lambda each: server.post(*each), requests))


def require_below_limit(server: Serving, answers: list[Answer], limit: int) -> None:
    assert {answer.status for answer in answers} == {200}  # each of them fits the empty server
    found = server.health()
    assert found["peak_bytes"] <= limit
    assert (found["waiting"], found["served"]) == (0, len(answers))


def test_requests_wait_stream_and_are_refused_below_the_limit(models: dict[str, Path]) -> None:
    with serving(models["llama"]) as server:
        answers = burst(server, 1, 16)
        require_below_limit(server, answers, LIMIT)
        stream = server.post(60, 5, stream=True)
        assert stream.text.rstrip().endswith("data: [DONE]")
        large = server.post(9000, 10)
        assert (large.status, large.json["error"]["type"]) == (413, "memory")
        largest = large.json["error"]["largest_prompt_tokens"]
        assert 500 < largest < 9000
        assert server.post(20, 5, model="another/model").status == 404
        alone = server.post(50, 5, seed=3)
        assert alone.json["usage"]["completion_tokens"] == 5
        assert server.health()["peak_bytes"] <= LIMIT
        with ThreadPoolExecutor(1) as clients:
            running = clients.submit(server.post, 200, 200)
            while not server.health()["in_flight"]:
                time.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            while server.get("/health").status == 200:
                time.sleep(0.02)
            late = server.post(9, 1)
            assert (late.status, late.json["error"]["type"]) == (503, "draining")
            assert int(late.headers["Retry-After"]) > 0
            assert running.result().json["usage"]["completion_tokens"] == 200
        assert server.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.exhaustive
def test_a_killed_server_ends_with_a_message(models: dict[str, Path]) -> None:
    with serving(models["llama"]) as server:
        os.kill(server.child(), signal.SIGKILL)
        _, errors = server.process.communicate(timeout=PATIENCE_SECONDS)
        assert server.process.returncode == 5
        assert "the server ended by itself: killed by signal 9" in errors
        assert "Traceback" not in errors


@pytest.mark.exhaustive
def test_requests_beyond_the_queue_are_asked_to_return(models: dict[str, Path]) -> None:
    with serving(models["llama"], "--max-waiting", "1", limit=12_000_000) as server:
        answers = burst(server, 2, 12)
        busy = [each for each in answers if each.status == 503]
        assert busy
        assert all(each.headers["Retry-After"] for each in busy)
        assert {each.json["error"]["type"] for each in busy} == {"busy"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(50))
def test_thirty_requests_at_once_stay_below_the_limit(models: dict[str, Path], seed: int) -> None:
    name = tuple(models)[seed % len(models)]
    limit = 70_000_000 if name == "states" else random.Random(seed).choice((40, 60)) * 10**6
    with serving(models[name], limit=limit) as server:
        require_below_limit(server, burst(server, seed, 30), limit)
