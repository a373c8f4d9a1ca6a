"""The generation thread of mlx_lm.server, which takes a request only when the guard admits it.

Source: mlx-lm 0.32.2 server.py (ResponseGenerator._generate, _next_request). All but `generate` and
the counters of open requests runs in that thread.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from queue import Empty
from time import monotonic_ns
from typing import Any

import mlx.core as mx
from mlx_lm import server

from memfit.estimators.guard.guard import Admit, Guard, Refuse, Wait
from memfit.estimators.guard.queue import AdmissionQueue
from memfit.estimators.guard.state import Entry, Request, Row, State
from memfit.probes.guarded.caches import SettledGenerator, StoredCaches, held_bytes

RETRY_AFTER_SECONDS = 5


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """A request is not served; ``reason`` is the JSON of the answer."""

    def __init__(self, status: int, message: str, **reason: Any) -> None:
        """Take the HTTP status, and what is wrong."""
        super().__init__(message)
        self.status, self.reason = status, {"message": message, **reason}


class Refused(BaseException):
    """A refusal on its way past the handler of mlx-lm, which makes 404 of every Exception."""


class _Open:
    """A request from its arrival to its end."""

    def __init__(self, item: Any, tokenized: Any, *, runs_alone: bool) -> None:
        self.item, self.tokenized, self.runs_alone = item, tokenized, runs_alone
        self.entry: Any = None
        """The stored cache that it begins with, until its first call."""
        self.request: Request | None = None


class GuardedGenerator(server.ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's, behind the queue of a guard."""

    def __init__(self, provider: Any, guard: Guard, *, max_waiting: int) -> None:
        """Take the model, the guard, and how many requests may wait."""
        self.guard, self._max_waiting = guard, max_waiting
        self.queue = AdmissionQueue(guard, self)
        self.stored = StoredCaches(provider.cli_args.prompt_cache_size, self.queue.store)
        self._batch: SettledGenerator | None = None
        self._step = guard.prefill_step
        self._names = count(1)
        self._open: dict[str, _Open] = {}
        self._ready: deque[str] = deque()
        self._inserting: str | None = None
        self._uids: dict[int, str] = {}
        self._other_bytes: int | None = None
        self.refused = self.served = 0
        self.is_draining = False
        self._lock, self.in_flight = threading.Lock(), 0
        server.BatchGenerator = self._new_batch
        super().__init__(provider, self.stored)

    # What the handlers of HTTP call, in their threads.

    def generate(self, *arguments: Any, **named: Any) -> Any:
        """Return the reply to a request, once it is admitted."""
        try:
            return super().generate(*arguments, **named)
        except Refusal as refusal:
            self.refused += 1
            raise Refused(refusal) from None

    def counting(self, change: int) -> None:
        """Count a request that begins or ends, by 1 or -1."""
        with self._lock:
            self.in_flight += change

    def figures(self) -> dict[str, int]:
        """Return what the guard counts, in bytes and requests."""
        return {
            "limit_bytes": self.guard.limit_bytes,
            "active_bytes": mx.get_active_memory(),
            "peak_bytes": mx.get_peak_memory(),
            "waiting": len(self.queue.waiting),
            "in_flight": self.in_flight,
            "stored": len(self.stored),
            "refused": self.refused,
            "served": self.served,
        }

    # What mlx-lm's loop calls.

    def _next_request(self, timeout: float | None = None) -> Any:
        if self._other_bytes is None:
            extra = mx.get_active_memory() - self.guard.tables.weights_bytes
            self._other_bytes = max(0, extra)
            mx.reset_peak_memory()  # of the load
        self._finish_ended()
        if not any(True for _ in self._prefilling()):
            self._set_step(self.guard.prefill_step)
        self.queue.retry(_now_ms())
        self._receive(None if self._ready else timeout)
        if not self._ready:
            return None
        self._inserting = self._ready.popleft()
        return self._open[self._inserting].item

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        for each in self._open.values():
            if each.item[1] is request:
                return each.tokenized
        return super()._tokenize(tokenizer, request, args)

    def _serve_single(self, request: Any, stream: Any) -> None:
        super()._serve_single(request, stream)
        self._finish(self._inserting)

    def _new_batch(self, model: Any, **settings: Any) -> Any:
        generator = self

        class Batch(SettledGenerator):
            def insert_segments(self, *arguments: Any, **named: Any) -> Any:
                """Insert a request, whose name its number in the batch then has."""
                uids = super().insert_segments(*arguments, **named)
                assert generator._inserting
                generator._uids[uids[0]], generator._inserting = generator._inserting, None
                return uids

            def close(self) -> None:
                """End the batch."""
                super().close()
                if generator._batch is self:
                    generator._batch = None

        settings["prefill_step_size"] = self._step
        self._batch = Batch(self.stored, model, **settings)
        return self._batch

    # What the queue calls.

    def state(self) -> State:
        assert self._other_bytes is not None
        approved = sum(nbytes for _, nbytes in self.stored.approved.values())
        pending = {id(each.entry) for each in self._pending() if each.entry}
        batch = self._batch
        return State(
            decoding=tuple(_decoding(batch)),
            prefilling=tuple(self._prefilling()),
            entries=tuple(
                Entry(number, entry.real_bytes, number, entry.is_dropped or id(entry) in pending)
                for number, entry in sorted(self.stored.entries.items())
            ),
            step=self._step,
            other_bytes=self._other_bytes + approved,
            decode_bytes=batch._generation_batch.held_bytes if batch else 0,
            prompt_bytes=held_bytes(batch._prompt_batch.prompt_cache) if batch else 0,
        )

    def request(self, name: str) -> Request:
        opened = self._open[name]
        prompt, args = opened.tokenized[0], opened.item[2]
        key = self.model_provider.model_key
        opened.entry, used = self.stored.nearest(key, prompt)
        opened.request = Request(len(prompt) - used, args.max_tokens, used)
        return opened.request

    def is_free(self, name: str) -> bool:
        """Return whether a request may run: one that cannot be batched needs the whole server."""
        alone = [
            each for each in (*self._ready, self._inserting) if each and self._open[each].runs_alone
        ]
        if self._open[name].runs_alone:
            return not (alone or any(_decoding(self._batch)) or any(self._prefilling()))
        return not alone

    def evict(self, ids: Sequence[Any]) -> None:
        for each in ids:
            self.stored.evict(each)

    def start(self, name: str, admitted: Admit) -> None:
        self._ready.append(name)
        self._set_step(admitted.step)

    def wait(self, name: str, decision: Wait) -> None:
        self._open[name].entry = None

    def _receive(self, timeout: float | None) -> None:
        """Take what has arrived out of the queue of mlx-lm into the guard's."""
        while True:
            try:
                item = self.requests.get(timeout=timeout) if timeout else self.requests.get_nowait()
            except Empty:
                return
            timeout = None
            try:
                self._arrive(*item)
            except Exception as error:  # noqa: BLE001 - of a template, a tokenizer: the request's
                item[0].put(error)

    def _arrive(self, answers: Any, request: Any, args: Any) -> None:
        if any(server._image_parts(request.messages or ())):
            raise Refusal(400, "images are not guarded: send text", type="unsupported")
        if len(self.queue.waiting) >= self._max_waiting:
            text = f"{self._max_waiting} requests wait already"
            raise Refusal(503, text, type="busy")
        provider = self.model_provider
        found = super()._tokenize(provider.tokenizer, request, args)
        prompt, _, _, state, vision = found
        # One segment: the guard knows how many chunks there are.
        tokenized = prompt, [prompt], ["assistant"], state, vision
        name = str(next(self._names))
        item = answers, request, args
        self._open[name] = _Open(item, tokenized, runs_alone=not self._is_batchable(args))
        refusal = self.queue.request(name, _now_ms())
        if refusal:
            del self._open[name]
            raise _too_large(refusal, len(prompt), args.max_tokens)

    def _finish_ended(self) -> None:
        live = set(self._live())
        for uid in [uid for uid in self._uids if uid not in live]:
            self._finish(self._uids.pop(uid))
        if self._inserting:  # the loop gave it up: its queue has the error
            self._finish(self._inserting)
        waiting = {seq[0] for seq in self._batch._unprocessed_sequences} if self._batch else set()
        for uid, name in self._uids.items():
            if uid not in waiting:  # merged: it refers to no entry any more
                self._open[name].entry = None

    def _finish(self, name: str | None) -> None:
        self._inserting = None if self._inserting == name else self._inserting
        if name and self._open.pop(name, None):
            self.served += 1
            self.queue.end(name, _now_ms())

    def _live(self) -> Iterator[int]:
        if batch := self._batch:
            yield from batch._generation_batch.uids
            yield from batch._prompt_batch.uids
            yield from (sequence[0] for sequence in batch._unprocessed_sequences)

    def _pending(self) -> Iterator[_Open]:
        """The requests that were started and not called yet."""
        started = (
            *self._ready,
            *([self._inserting] if self._inserting else ()),
            *self._uids.values(),
        )
        return (self._open[name] for name in started)

    def _prefilling(self) -> Iterator[Row]:
        if batch := self._batch:
            prompts = batch._prompt_batch
            for tokens, work, most in zip(
                prompts.tokens, batch._currently_processing, prompts.max_tokens, strict=True
            ):
                yield Row(len(tokens), sum(map(len, work[0])), most)
            for _, segments, most, _, tokens, *_ in batch._unprocessed_sequences:
                yield Row(len(tokens), sum(map(len, segments)), most)
        for name in (*self._ready, *([self._inserting] if self._inserting else ())):
            request = self._open[name].request
            assert request
            yield Row(request.cached, request.new, request.max_tokens, name)

    def _set_step(self, step: int) -> None:
        self._step = step
        if self._batch:
            self._batch.prefill_step_size = step


def _decoding(batch: SettledGenerator | None) -> Iterator[Row]:
    if batch:
        rows = batch._generation_batch
        for tokens, most, made in zip(rows.tokens, rows.max_tokens, rows._num_tokens, strict=True):
            yield Row(len(tokens), 0, max(0, most - made))


def _too_large(refusal: Refuse, prompt: int, max_tokens: int) -> Refusal:
    return Refusal(
        413,
        f"{prompt} tokens of a prompt and {max_tokens} of a reply: {refusal.reason}",
        type="memory",
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        largest_prompt_tokens=refusal.largest_prompt,
    )


def _now_ms() -> int:
    return monotonic_ns() // 1_000_000
