"""Run mlx_lm.server, which loads its model at the line ``go`` on standard input.

Until then requests queue up. Each line is answered by MLX's active and peak bytes, and the length
of the queue.
"""

import json
import sys
from threading import Event, Thread

import mlx.core as mx
from mlx_lm import server

GO = Event()


class Provider(server.ModelProvider):  # type: ignore[misc]
    """Waits before it loads the model of the command line."""

    def load_default(self) -> None:
        """Load it when all requests have arrived."""
        GO.wait()
        super().load_default()


class Generator(server.ResponseGenerator):  # type: ignore[misc]
    """Says how many requests have arrived."""

    def __init__(self, *arguments: object) -> None:
        """Start to answer the lines of standard input."""
        super().__init__(*arguments)
        Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        for line in sys.stdin:
            if line.strip() == "go":
                GO.set()
            found = (mx.get_active_memory(), mx.get_peak_memory(), self.requests.qsize())
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    server.ModelProvider, server.ResponseGenerator = Provider, Generator
    server.main()
