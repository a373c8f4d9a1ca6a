"""mlx-lm's batch generator behind a guard, call by call: what `memfit replay` follows."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.guard.call_tables import CallTables
from memfit.estimators.guard.guard import Admit, Evict, Guard, Refuse, Wait
from memfit.estimators.guard.queue import AdmissionQueue
from memfit.estimators.guard.state import Entry, Request, Row, State
from memfit.estimators.mlx.arrivals import Arrivals, ServedRequest
from memfit.estimators.mlx.batch_schedule import BatchSchedule, ScheduleMoment, ServedRow
from memfit.estimators.mlx.kv_cache import BatchBuffer


class GuardedSchedule(BatchSchedule):
    """Requests through the queue of a guard, whose stored caches are evaluated at once."""

    _settles = True

    def __init__(
        self,
        requests: Sequence[ServedRequest],
        longest_replies: Sequence[int],
        guard: Guard,
        arrivals: Arrivals,
        *,
        prompt_cache_size: int = 10,
    ) -> None:
        """Take requests with the replies they get, and those that they ask for at most."""
        settings = ServerSettings(
            prefill_step=guard.prefill_step,
            prompt_concurrency=guard.prompt_concurrency,
            decode_concurrency=guard.decode_concurrency,
            prompt_cache_size=prompt_cache_size,
        )
        tables = guard.tables
        super().__init__(
            requests, settings, arrivals, windows=tables.windows, has_states=tables.has_states
        )
        self._guard, self._longest = guard, longest_replies
        self._true = tables.without_error()
        self._clairvoyant = replace(guard, tables=self._true)
        self.queue = AdmissionQueue(guard, self)
        self._held: dict[str, ServedRow] = {}
        """Requests in the queue."""
        self._open: set[int] = set()
        self.refused: dict[int, Refuse] = {}
        self.waits: set[int] = set()
        """Requests that could not start when they arrived."""
        self._judged: set[int] = set()
        self.waits_in_vain: set[int] = set()
        """Of those, the ones that could have as the first of the queue, had all lengths of replies
        been known."""
        self.evicted = self.not_stored = 0

    def bytes_of(self, moment: ScheduleMoment, tables: CallTables | None = None) -> int:
        """Return the bytes of the moment that `moments` has just yielded, without an error."""
        tables = tables or self._true
        held = tables.weights_bytes + sum(map(tables.buffer_bytes, moment.buffers))
        held += tables.logits_bytes(moment.running)
        if chunk := moment.prefilled:
            tokens = min(self._step, max(row.prefix - row.done for row in self._prompts))
            call = tables.chunk_bytes(chunk.rows, tokens, max(tokens, chunk.index))
            return held + tables.buffer_bytes(chunk) + call
        stepped = moment.stepped
        return held + (tables.step_bytes(stepped.rows, stepped.index) if stepped else 0)

    def stored_bytes(self) -> int:
        """Return the bytes of the prompt cache."""
        return sum(self._true.buffer_bytes(entry.buffer) for entry in self._stored.values())

    @property
    def limit_bytes(self) -> int:
        """Of the guard."""
        return self._guard.limit_bytes

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self._call

    @property
    def running(self) -> int:
        """Requests that were started and have not ended."""
        return sum(1 for _ in self._running())

    def state(self, *, exact: bool = False) -> State:
        """Return what is held now; ``exact`` with the replies that rows get."""
        size = self._guard.tables.buffer_bytes
        hits = {id(row.hit): row.hit for row in self._waiting if row.hit}
        stored = {id(entry) for entry in self._stored.values()}
        return State(
            decoding=tuple(self._row(row, exact) for row in self._decoding),
            prefilling=tuple(self._row(row, exact) for row in (*self._prompts, *self._waiting)),
            entries=tuple(
                Entry(key, size(entry.buffer), used, id(entry) in hits)
                for used, (key, entry) in enumerate(self._stored.items())
            ),
            step=self._step,
            # A hit refers to its entry until its first chunk, whether that was dropped or not.
            other_bytes=sum(size(hit.buffer) for key, hit in hits.items() if key not in stored),
            decode_bytes=sum(map(size, self._decode_parts)),
            prompt_bytes=size(self._prompt_buffer) if self._prompt_buffer else 0,
        )

    def _row(self, row: ServedRow, exact: bool) -> Row:
        most = row.max_tokens if exact else self._longest[row.number]
        left = most - row.generated
        prompt = 0 if row.is_decoding else row.request.prompt_tokens - row.done
        return Row(row.tokens, prompt, left, row.number)

    def request(self, name: str) -> Request:
        row = self._held[name]
        row.done, row.hit, row.replaced = 0, None, None
        hits = self.hits
        self._look_up(row)
        self.hits = hits
        return Request(row.request.prompt_tokens - row.done, self._longest[row.number], row.done)

    def is_free(self, name: str) -> bool:
        return True

    def evict(self, ids: Sequence[Any]) -> None:
        for each in ids:
            del self._stored[each]
        self.evicted += len(ids)

    def start(self, name: str, admitted: Admit) -> None:
        row = self._held.pop(name)
        self.hits += row.hit is not None
        self._step = admitted.step
        self._open.add(row.number)
        self._waiting.append(row)

    def _arrive(self) -> None:
        for number in self._open - {row.number for row in self._running()}:
            self._open.remove(number)
            self.queue.end(str(number), self._call)
        self._retry()
        while self._take() and not self._is_busy:
            pass

    def _take(self) -> int:
        """Let requests arrive; return how many."""
        count = self._arrivals.take(self._call, is_busy=self._is_busy, generated=self._generated)
        arrived = [self._coming.popleft() for _ in range(min(count, len(self._coming)))]
        for row in arrived:
            name = str(row.number)
            self._held[name] = row
            if refusal := self.queue.request(name, self._call):
                del self._held[name]
                self.refused[row.number] = refusal
                row.generated = row.max_tokens  # others that came after its end do not wait for it
                self._arrivals.end(self._call, 1)
            elif name in self._held:
                self.waits.add(row.number)
        return len(arrived)

    def wait(self, name: str, decision: Wait) -> None:
        row = self._held[name]
        if row.number not in self._judged:
            self._judged.add(row.number)
            asked = replace(self.request(name), max_tokens=row.max_tokens)
            found = self._clairvoyant.admit(asked, self.state(exact=True))
            if isinstance(found, (Admit, Evict)):
                self.waits_in_vain.add(row.number)

    def _retry(self) -> None:
        if not (self._prompts or self._waiting):
            self._step = self._guard.prefill_step
        self.queue.retry(self._call)

    def _running(self) -> Iterator[ServedRow]:
        yield from (*self._decoding, *self._prompts, *self._waiting)

    def _end(self, buffer: BatchBuffer) -> None:
        super()._end(buffer)
        # At once, before rows join in the same call: a reply's cache that nobody has computed keeps
        # the batch that it was cut from.
        for row, ended in self._finished:
            self._insert(row, ended)
        self._arrivals.end(self._call, len(self._finished))
        self._finished = []
        self._decode_parts = (self._decode_buffer,) if self._decode_buffer else ()

    def _store(self) -> None:
        super()._store()  # prefixes
        # What is stored is evaluated, and what is not is dropped: no variable keeps a batch.
        self._responses, self._last_prefix = (), None

    def _insert(self, row: ServedRow, buffer: BatchBuffer) -> None:
        key = row.text, row.tokens
        if not self.queue.store(row.tokens):
            self.not_stored += 1
            return
        super()._insert(row, buffer)
        if entry := self._stored.get(key):
            entry.buffer, entry.is_evaluated = entry.row(), True
