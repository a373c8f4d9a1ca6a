"""Run mlx_lm.server, which loads its model at the line ``go`` on standard input.

Until then requests queue up. Each line is answered by MLX's active and peak bytes, the length of
the queue, and the requests that were taken out of it: the tokens of each prompt and reply, how many
calls of the batch generator had work before, and, where its cache was found, whose it was and how
many tokens of it are used.
"""

import json
import sys
from threading import Event, Thread
from typing import Any

import mlx.core as mx
from mlx_lm import server

GO = Event()
TAKEN: list[tuple[int, int, int, int | None, int]] = []


class Provider(server.ModelProvider):  # type: ignore[misc]
    """Waits before it loads the model of the command line."""

    def load_default(self) -> None:
        """Load it when all requests have arrived."""
        GO.wait()
        super().load_default()


class Batches(server.BatchGenerator):  # type: ignore[misc]
    """Counts its calls, and marks caches with the request they are of."""

    calls = 0

    def next(self) -> Any:
        """Count a call that has work."""
        prompts, replies = super().next()
        self.calls += bool(prompts or replies)
        for each in replies:
            if each.prompt_cache:
                each.prompt_cache[0].of_request = each.uid
        return prompts, replies

    def extract_cache(self, uids: list[int]) -> Any:
        """Mark the caches of prompts."""
        found = super().extract_cache(uids)
        for uid, (caches, _) in found.items():
            caches[0].of_request = uid
        return found

    def insert_segments(self, *, segments: Any, max_tokens: Any, caches: Any, **rest: Any) -> Any:
        """Note a request."""
        used = len(rest["all_tokens"][0])
        of_request = getattr(caches[0][0], "of_request", None) if caches[0] else None
        TAKEN.append(
            (used + sum(map(len, segments[0])), max_tokens[0], self.calls, of_request, used)
        )
        return super().insert_segments(
            segments=segments, max_tokens=max_tokens, caches=caches, **rest
        )


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
            found = (mx.get_active_memory(), mx.get_peak_memory(), self.requests.qsize(), TAKEN)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    server.ModelProvider, server.ResponseGenerator = Provider, Generator
    server.BatchGenerator = Batches
    server.main()
