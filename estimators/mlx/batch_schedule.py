"""mlx-lm's batch generator, call by call: which buffers of caches exist at the same time.

Sources, mlx-lm 0.32.2: generate.py (BatchGenerator._next, PromptProcessingBatch, GenerationBatch),
models/cache.py (BatchKVCache, LRUPromptCache), server.py (ResponseGenerator._generate).

Two things make mlx_lm.server hold more than its log says. The prompt cache is a slice of a batch's
buffer that nobody has evaluated yet: until it is used again it keeps the buffer of the whole batch.
And every prompt leaves such a slice when it is prefilled, which the prompt cache keeps until the
request ends.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.mlx.arrivals import Arrivals, ServedRequest
from memfit.estimators.mlx.kv_cache import BatchBuffer


class ScheduleMoment(Struct, frozen=True):
    """What is in memory while a chunk of prompts is prefilled, or between two calls."""

    buffers: tuple[BatchBuffer, ...]
    """All but the one that is being prefilled."""
    prefilled: BatchBuffer | None = None
    """The batch of prompts after the chunk."""
    stepped: BatchBuffer | None = None
    """The batch that decodes after a step of it that is computed, None where none is."""
    running: int = 0
    """Requests that decode."""
    stored: int = 0
    """Entries of the prompt cache."""


_Key = tuple[int, int]
"""An entry of the prompt cache: a text, and how many of its tokens."""


class _StoredBatch:
    """A stored cache: the batch it is a slice of, or its own row once it was evaluated."""

    def __init__(self, buffer: BatchBuffer, tokens: int) -> None:
        self.buffer, self.tokens, self.is_evaluated = buffer, tokens, False

    def row(self) -> BatchBuffer:
        """Return the row alone (cache.py, extract): KV is copied, states stay slices of all."""
        batch, tokens = self.buffer, self.tokens
        windows = tuple((limit, min(room, tokens)) for limit, room in batch.windows)
        states = batch.state_rows or batch.rows
        return BatchBuffer(1, windows, tokens, tokens, tokens, batch.viewed, states)


class ServedRow:
    """A request in a batch."""

    def __init__(self, number: int, request: ServedRequest) -> None:
        self.number, self.request, self.max_tokens = number, request, request.max_tokens
        # The last token of a prompt starts the generation (BatchGenerator.insert_segments).
        self.prefix, self.done, self.generated = request.prompt_tokens - 1, 0, 0
        self.is_decoding = self.is_stored = False
        self.hit: _StoredBatch | None = None
        self.replaced: _Key | None = None
        """The entry of which its own is a continuation."""
        self.text = -1 - number if request.text is None else request.text
        self.begun: _Key = self.text, self.prefix
        self.whole: _Key = self.text, request.prompt_tokens + request.max_tokens
        """The entries of its prompt, and of that with its reply."""

    @property
    def tokens(self) -> int:
        """Tokens in its cache: the last one of the prompt is written with the first step."""
        return self.done + self.is_decoding + self.generated


class BatchSchedule:
    """Requests through the batch generator, in their order."""

    _settles = False
    """Whether each copy of a batch is computed at once, layer by layer, as a guarded server does:
    then a batch and its copy are in memory one after the other."""

    def __init__(
        self,
        requests: Iterable[ServedRequest],
        settings: ServerSettings,
        arrivals: Arrivals,
        *,
        windows: Collection[int] = (),
        has_states: bool = False,
        keeps_prefixes: bool = True,
    ) -> None:
        """Take the requests, when each is taken out of the queue, and the kinds of caches.

        The server ``keeps_prefixes`` of prompts, the batch generator alone does not.
        """
        self._keeps_prefixes = keeps_prefixes
        self._settings, self._step, self._arrivals = settings, settings.prefill_step, arrivals
        self._limits = tuple(windows)
        # A cache that can be trimmed takes the place of its own prefixes (LRUPromptCache).
        self._longest_trimmed = min(windows, default=2**62) - 1 if not has_states else 0
        self._coming = deque(ServedRow(*each) for each in enumerate(requests))
        self._rows = tuple(self._coming)
        self._call = 0
        self._waiting: deque[ServedRow] = deque()
        self._prompts: list[ServedRow] = []
        self._decoding: list[ServedRow] = []
        self._prompt_buffer: BatchBuffer | None = None
        self._decode_buffer: BatchBuffer | None = None
        # Rows that leave or join are copied by the next call: until then these are in memory.
        self._decode_parts: tuple[BatchBuffer, ...] = ()
        self._has_joined = False
        self._stored: dict[_Key, _StoredBatch] = {}
        self._last_prefix: BatchBuffer | None = None  # a variable of the server's loop
        self._finished: list[tuple[ServedRow, BatchBuffer]] = []
        self._responses: tuple[
            BatchBuffer, ...
        ] = ()  # the loop's variable until the next call ends
        # Prompts join the rows that are ready to decode, which leave at once: a chunk is computed
        # from a part of that buffer.
        self._extended: BatchBuffer | None = None
        self._evaluated: list[tuple[_StoredBatch, BatchBuffer]] = []
        self.waited = 0
        """Requests that found no room when they arrived."""
        self.hits = 0
        """Requests that began with a stored cache."""

    def moments(self) -> Iterator[ScheduleMoment]:
        """Yield the moments in which the most can be in memory, until every request has ended."""
        self._arrive()
        while self._is_busy:
            self._skip()
            yield from self._decode()
            yield from self._start_decoding()
            yield from self._prefill()
            self._call += 1
            self._store()
            yield self._moment()
            self._arrive()

    def idle(self) -> ScheduleMoment:
        """Return what is in memory now that every request has ended."""
        return self._moment()

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting or self._prompts or self._decoding)

    def _generated(self, number: int) -> int:
        return self._rows[number].generated

    def _arrive(self) -> None:
        count = self._arrivals.take(self._call, is_busy=self._is_busy, generated=self._generated)
        for _ in range(min(count, len(self._coming))):
            open_ = len(self._decoding) + len(self._prompts) + len(self._waiting)
            self.waited += open_ >= self._settings.rows
            row = self._coming.popleft()
            self._look_up(row)
            self._waiting.append(row)
            self._last_prefix = None  # server.py: del cache

    def _skip(self) -> None:
        """Without a server, make the calls that differ from the next in smaller buffers alone."""
        changes = self._keeps_prefixes or self._responses or (self._waiting and self._room > 0)
        full = len(self._decoding) >= self._settings.rows
        # A first chunk can take more than those after it: it makes what a class keeps for itself.
        if not self._prompts or changes or full or not all(row.done for row in self._prompts):
            return
        chunks = min((row.prefix - row.done) // self._step for row in self._prompts)
        calls = min(chunks, *(row.max_tokens - row.generated for row in self._decoding), 2**62) - 1
        if calls < 1:
            return
        if self._decoding:
            self._decode_by(calls)
        for row in self._prompts:
            row.done += calls * self._step
        buffer = self._prompt_buffer or self._merged(self._prompts)
        self._prompt_buffer = buffer.grown(calls * self._step, self._step)
        self._call += calls

    @property
    def _room(self) -> int:
        """Prompts that may join those that are prefilled."""
        settings = self._settings
        return min(
            settings.prompt_concurrency - len(self._prompts),
            settings.rows - len(self._decoding),
        )

    def _look_up(self, row: ServedRow) -> None:
        """Find the stored cache that a request begins with (LRUPromptCache)."""
        most, longest = row.prefix, max(row.prefix, self._longest_trimmed)
        if row.request.continues is None:
            # The longest beginning of the prompt, or what can be trimmed to one.
            keys = [key for key in self._stored if key[0] == row.text and key[1] <= longest]
        else:
            before = self._rows[row.request.continues]
            keys = [key for key in (before.whole, before.begun) if key in self._stored]
            most = row.request.cached_tokens
        if keys:
            self.hits += 1
            row.hit = self._stored[max(keys)]
            row.done = min(row.prefix, most, row.hit.tokens)
            row.replaced = max(keys) if row.done >= row.hit.tokens else None

    def _decode(self) -> Iterator[ScheduleMoment]:
        """Generate until something else happens: a call, or all calls until a request ends."""
        if not self._decoding or not self._decode_buffer:
            return
        calls = self._calls()
        if self._has_joined:
            # The parts are copied in this call. A server counts them whole, since a GPU may free
            # them later; a batch alone was measured with the copies of one layer.
            parts = self._decode_parts if self._keeps_prefixes and not self._settles else ()
            self._has_joined = False
            self._decode_by(1)
            yield self._moment(*parts, stepped=self._decode_buffer)
            calls -= 1
            self._call += 1 if calls else 0
        if calls:
            self._decode_by(calls)
            self._call += calls - 1
        yield self._moment(stepped=self._decode_buffer)
        self._end(self._decode_buffer)

    def _end(self, buffer: BatchBuffer) -> None:
        """Take the requests that have all their tokens out of the decoding batch."""
        ended = [row for row in self._decoding if row.generated >= row.max_tokens]
        if ended:
            self._finished = [(row, buffer) for row in ended]
            self._decoding = [row for row in self._decoding if row not in ended]
            longest = max((row.tokens for row in self._decoding), default=0)
            left = len(self._decoding)
            self._decode_buffer = buffer.kept(left, longest) if left else None
            # Nothing refers to the buffer of a batch without rows but what was stored of it.
            self._decode_parts = self._decode_parts if left else ()

    def _calls(self) -> int:
        """Calls in which nothing but decoding happens."""
        calls = min(row.max_tokens - row.generated for row in self._decoding)
        full = len(self._decoding) >= self._settings.rows
        if self._prompts or (self._waiting and not full):
            return 1
        quiet = self._arrivals.quiet(self._call, self._generated) if self._coming else None
        return calls if quiet is None else min(calls, quiet)

    def _decode_by(self, calls: int) -> None:
        # A buffer that the prompt cache keeps is copied before it is written again.
        assert self._decode_buffer
        self._decode_buffer = self._decode_buffer.decoded(calls)
        self._decode_parts = (self._decode_buffer,)
        for row in self._decoding:
            row.generated += calls

    def _start_decoding(self) -> Iterator[ScheduleMoment]:
        """Admit prompts, and move those that are prefilled to the decoding batch."""
        self._extended = None
        if len(self._decoding) >= self._settings.rows:
            return
        self._extended = self._admit()
        if self._extended and self._settles:
            self._extended = None
            yield self._moment()
        ready = [row for row in self._prompts if row.done == row.prefix]
        if not ready:
            return
        self._prompts = [row for row in self._prompts if row.done < row.prefix]
        buffer = self._prompt_buffer or self._merged(ready)
        moved = buffer.kept(len(ready), max(row.prefix for row in ready))
        if self._prompts:
            longest = max(row.done for row in self._prompts)
            self._prompt_buffer = buffer.kept(len(self._prompts), longest)
        else:
            self._prompt_buffer = None
        self._has_joined = bool(self._decoding)
        for row in ready:
            row.is_decoding = True
        self._decoding += ready
        # Its first step is computed at once (GenerationBatch.__init__).
        moved = moved.grown(1)
        self._decode_parts += (moved,)
        self._decode_buffer = moved.joined(self._decode_buffer)
        yield self._moment(*self._joining(), stepped=moved)
        if self._settles:
            self._decode_parts = (self._decode_buffer,)

    def _joining(self) -> tuple[BatchBuffer, ...]:
        return (self._extended,) if self._extended else ()

    def _admit(self) -> BatchBuffer | None:
        """Let prompts in, and return the batch of prompts if they joined one."""
        room = min(self._room, len(self._waiting))
        admitted = [self._waiting.popleft() for _ in range(room)]
        if not admitted:
            return None
        new = self._merged(admitted)
        joined = new.joined(self._prompt_buffer) if self._prompt_buffer else None
        self._prompt_buffer = joined or (new if new.index else None)
        self._prompts += admitted
        for row in admitted:
            if row.hit and not row.hit.is_evaluated:
                row.hit.is_evaluated = True
                self._evaluated.append((row.hit, row.hit.row()))
        return joined

    def _merged(self, rows: Collection[ServedRow]) -> BatchBuffer:
        """The batch of rows before their first chunk, which begin with stored caches or without."""
        tokens = max(row.done for row in rows)
        windows = tuple((limit, min(limit, tokens)) for limit in self._limits)
        return BatchBuffer(len(rows), windows, tokens, tokens, tokens)

    def _prefill(self) -> Iterator[ScheduleMoment]:
        """Prefill the next chunk of every prompt."""
        if not self._prompts or len(self._decoding) >= self._settings.rows:
            return
        chunk = min(self._step, max(row.prefix - row.done for row in self._prompts))
        before = self._prompt_buffer or self._merged(self._prompts)
        self._prompt_buffer = None
        padded = any(row.prefix - row.done < chunk for row in self._prompts)
        grown = before.grown(chunk, self._step, padded=padded)
        yield self._moment(*self._joining(), prefilled=grown)
        self._prompt_buffer = grown
        for row in self._prompts:
            row.done = min(row.prefix, row.done + self._step)

    def _store(self) -> None:
        """Put prefixes, then whole conversations into the prompt cache."""
        for entry, alone in self._evaluated:
            entry.buffer = alone
        self._evaluated = []
        for row in self._prompts:
            # Once: a row can wait here for a place in the decoding batch while it is evicted.
            if self._keeps_prefixes and row.done == row.prefix and not row.is_stored:
                row.is_stored = True
                buffer = self._prompt_buffer or self._merged([row])
                self._last_prefix = buffer
                self._insert(row, buffer)
        for row, ended in self._finished:
            self._insert(row, ended)
        self._responses = tuple(buffer for _, buffer in self._finished)
        self._arrivals.end(self._call, len(self._finished))
        self._finished = []

    def _insert(self, row: ServedRow, buffer: BatchBuffer) -> None:
        """Store an entry as the newest, which replaces an equal one and all that it begins with."""
        text, tokens = key = row.text, row.tokens
        old = {key}
        if tokens <= self._longest_trimmed:
            old |= {each for each in self._stored if each[0] == text and each[1] < tokens}
            old |= {row.replaced} if row.replaced else set()
        for each in old:
            self._stored.pop(each, None)
        self._stored[key] = _StoredBatch(buffer, tokens)
        if len(self._stored) > self._settings.prompt_cache_size:
            del self._stored[next(iter(self._stored))]

    def _moment(
        self,
        *more: BatchBuffer,
        prefilled: BatchBuffer | None = None,
        stepped: BatchBuffer | None = None,
    ) -> ScheduleMoment:
        named = (self._last_prefix, *self._responses, *self._decode_parts, self._prompt_buffer)
        ended = (buffer for _, buffer in self._finished)
        entries = (entry.buffer for entry in self._stored.values())
        # A hit refers to its entry until its first chunk, whether that is evicted or not.
        hits = (row.hit.buffer for row in self._waiting if row.hit)
        copied = (buffer for each, row in self._evaluated for buffer in (each.buffer, row))
        held = (*entries, *hits, *copied, *ended, *named, *more)
        once = {id(buffer): buffer for buffer in held if buffer}
        running, stored = len(self._decoding), len(self._stored)
        return ScheduleMoment(tuple(once.values()), prefilled, stepped, running, stored)
