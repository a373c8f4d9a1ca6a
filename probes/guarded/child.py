"""The process of ``memfit serve``: ``python -m memfit.probes.guarded.child SETUP FLAGS``.

It ends when its standard input does, and on SIGTERM once the open requests have their replies.
"""

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any

import mlx.core as mx
from mlx_lm import server

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.guard.guard import Guard
from memfit.estimators.guard.opening import open_guard
from memfit.estimators.machine.host import detect_host
from memfit.estimators.sizing.catalog import Catalog
from memfit.probes.codeless import forbid_repository_code
from memfit.probes.guarded.generator import RETRY_AFTER_SECONDS, GuardedGenerator, Refusal, Refused
from memfit.probes.serving import SAID_WHY

_MOST_BODY_BYTES = 64 * 2**20


class Handler(server.APIHandler):  # type: ignore[misc]
    """mlx-lm's, which answers refusals with 413 and 503."""

    response_generator: GuardedGenerator

    def do_POST(self) -> None:  # noqa: N802 - the name is of http.server
        """Answer a request of reasonable size."""
        length = self.headers.get("Content-Length", "0")
        if length.isdecimal() and int(length) > _MOST_BODY_BYTES:
            self._refuse(Refusal(413, f"a body of {length} bytes", type="body"))
            return
        super().do_POST()

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Generate, or say why not."""
        generator = self.response_generator
        generator.counting(1)
        try:
            if refusal := self._refusal():
                self._refuse(refusal)
            else:
                super().handle_completion(request, stop_words)
        except Refused as refused:
            self._refuse(refused.args[0])
        finally:
            generator.counting(-1)

    def _refusal(self) -> Refusal | None:
        if self.response_generator.is_draining:
            return Refusal(503, "the server is stopping", type="draining")
        own = self.response_generator.cli_args.model
        if self.requested_model not in ("default_model", own, os.path.basename(own)):
            return Refusal(404, f"this server has one model: {own}", type="model")
        if self.adapter is not None or self.requested_draft_model != "default_model":
            return Refusal(400, "adapters and draft models are not guarded", type="unsupported")
        if self.max_tokens < 1:
            return Refusal(400, "max_tokens: give at least 1", type="request")
        return None

    def _refuse(self, refusal: Refusal) -> None:
        content = json.dumps({"error": refusal.reason}).encode()
        self._set_completion_headers(refusal.status)
        if refusal.status == 503:
            self.send_header("Retry-After", str(RETRY_AFTER_SECONDS))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_health_check(self) -> None:
        """Say whether it serves, with the memory and the counts of the guard."""
        generator = self.response_generator
        is_well = generator.is_healthy and not generator.is_draining
        self._set_completion_headers(200 if is_well else 503)
        self.end_headers()
        status = {"status": "ok" if is_well else "unavailable", **generator.figures()}
        self.wfile.write(json.dumps(status).encode())


def main() -> None:
    """Serve the model of the flags under the limit of the setup."""
    setup = json.loads(sys.argv[1])
    sys.argv = ["mlx_lm.server", *sys.argv[2:]]
    forbid_repository_code()
    server.run = partial(_run, setup)
    try:
        server.main()
    except MemfitError as error:
        sys.stderr.write(f"memfit: {error}\n")
        raise SystemExit(SAID_WHY) from None


def _run(setup: dict[str, Any], host: str, port: int, provider: Any) -> None:
    """What mlx_lm.server's own does, with a guard."""
    generator = GuardedGenerator(
        provider, _guard(setup, provider.cli_args), max_waiting=setup["max_waiting"]
    )
    stop = threading.Event()

    class Http(ThreadingHTTPServer):
        request_queue_size = 128

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            threading.Thread(target=_drain, args=(self, generator, stop), daemon=True).start()

    def finish(*_: object) -> None:
        generator.is_draining = True
        stop.set()

    signal.signal(signal.SIGTERM, finish)
    threading.Thread(target=_watch_parent, args=(finish,), daemon=True).start()
    server._run_http_server(host, port, generator, server_class=Http, handler_class=Handler)
    generator.stop_and_join()
    raise SystemExit(0 if stop.is_set() else 1)


def _guard(setup: dict[str, Any], flags: Any) -> Guard:
    device = detect_host(with_gpu=mx.default_device() == mx.Device(mx.gpu))
    return open_guard(
        setup["model"],
        lambda: Catalog().sized(setup["model"], device=device, adapter=flags.adapter_path),
        ServerSettings(
            prefill_step=flags.prefill_step_size,
            prompt_concurrency=flags.prompt_concurrency,
            decode_concurrency=flags.decode_concurrency,
        ),
        limit_bytes=setup["limit_bytes"],
    )


def _drain(http: ThreadingHTTPServer, generator: GuardedGenerator, stop: threading.Event) -> None:
    """End the server when it is asked to and no request is open, or when its thread has died."""
    while generator.generation_available():
        if stop.wait(0.5) and not generator.in_flight:
            break
        if stop.is_set():
            time.sleep(0.05)
    http.shutdown()


def _watch_parent(finish: Any) -> None:
    sys.stdin.read()
    finish()


if __name__ == "__main__":
    main()
