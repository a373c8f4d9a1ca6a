"""mlx-lm's batch generator, call by call: which KV buffers exist at the same time.

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
from msgspec.structs import replace

from memfit.estimators.arch.caches import STEP
from memfit.estimators.base.units import round_up
from memfit.estimators.results.server import ServerSettings

NAMED_BUFFERS = 6
"""The most buffers apart from those of the prompt cache: the last prefix, responses, two parts of
the decoding batch, the prompts and what they joined (`BatchSchedule`)."""


class Request(Struct, frozen=True):
    """One request: tokens of its prompt, and tokens it generates."""

    prompt_tokens: int
    max_tokens: int


class Buffer(Struct, frozen=True):
    """The caches of a batch in every layer: keys and values, and states."""

    rows: int
    windows: tuple[tuple[int, int], ...] = ()
    """Of each window of the model, and the tokens its buffers have room for."""
    index: int = 0
    """Tokens written by BatchKVCache, padding included."""
    capacity: int = 0
    """Tokens BatchKVCache has room for."""
    offset: int = 0
    """Tokens written by BatchRotatingKVCache, which keeps the padding of rows that left."""
    viewed: int = 0
    """Tokens of the last call, where a state is a slice of all of them."""

    def grown(self, tokens: int, step: int = 1, *, padded: bool = False) -> "Buffer":
        """Return the buffer after updates of up to ``step`` tokens each (cache.py).

        With ``padded`` some rows have fewer tokens, so that states are gathered, not cut.

        >>> Buffer(1, ((512, 0),)).grown(1300, 700).windows
        ((512, 1111),)
        """
        last = (tokens - 1) % step + 1
        end, capacity = self.index + tokens, self.capacity
        if end > capacity:
            kept = capacity if self.index % STEP == 0 else self.index
            capacity = kept + round_up(tokens, STEP)
        # BatchRotatingKVCache: a chunk is joined with the window less one token, one token takes
        # the place of the oldest.
        windows = tuple(
            (
                limit,
                min(room + tokens - last, limit - 1) + last
                if step > 1
                else min(limit, room if self.offset < room else room + STEP),
            )
            for limit, room in self.windows
        )
        viewed = 0 if padded else last
        return Buffer(self.rows, windows, end, capacity, self.offset + tokens, viewed)

    def decoded(self, tokens: int) -> "Buffer":
        """Return the buffer after as many updates of one token.

        >>> buffer = Buffer(1, ((512, 250),), 250, 256, 250).decoded(300)
        >>> buffer.index, buffer.capacity, buffer.windows
        (550, 768, ((512, 512),))
        """
        buffer = self
        while tokens:
            free = [room - buffer.offset for _, room in buffer.windows if room >= buffer.offset]
            step = min(tokens, max(0, buffer.capacity - buffer.index), *free) or 1
            buffer = replace(buffer.grown(step), windows=buffer.grown(1).windows, viewed=1)
            tokens -= step
        return buffer

    def kept(self, rows: int, longest: int) -> "Buffer":
        """Return the buffer of some of its rows, which are copied (``filter``)."""
        room = self.capacity - (self.index - longest)
        return Buffer(rows, self.windows, longest, room, self.offset)

    def joined(self, other: "Buffer | None") -> "Buffer":
        """Return the buffer of the rows of both, which are copied (``extend``)."""
        if other is None:
            return self
        return Buffer(
            self.rows + other.rows,
            tuple(map(max, self.windows, other.windows)),
            max(self.index, other.index),
            max(self.capacity, other.capacity),
            max(self.offset, other.offset),
        )


class Moment(Struct, frozen=True):
    """What is in memory while a chunk of prompts is prefilled, or between two calls."""

    buffers: tuple[Buffer, ...]
    """All but the one that is being prefilled."""
    prefilled_rows: int = 0
    prefilled_tokens: int = 0
    """Where the chunk ends."""
    stepped_rows: int = 0
    """Rows of a decode step that is computed, 0 where none is."""
    stepped_tokens: int = 0
    """Tokens in their buffer after it."""
    running: int = 0
    """Requests that decode."""
    stored: int = 0
    """Entries of the prompt cache."""


class _Row:
    """A request in a batch."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.max_tokens = number, request.max_tokens
        # The last token of a prompt starts the generation (BatchGenerator.insert_segments).
        self.prefix, self.done, self.generated = request.prompt_tokens - 1, 0, 0
        self.is_stored = False

    @property
    def tokens(self) -> int:
        return self.done + self.generated


class BatchSchedule:
    """Requests through the batch generator, in their order, from clients that never pause."""

    def __init__(
        self,
        requests: Iterable[Request],
        settings: ServerSettings,
        *,
        clients: int,
        windows: Collection[int] = (),
        has_states: bool = False,
        at_once: int = 0,
        keeps_prefixes: bool = True,
    ) -> None:
        """Take how many requests are open at a time, which arrive together, and the caches.

        ``at_once`` tokens of each prompt need no calls of their own: they may be in the prompt
        cache. The server ``keeps_prefixes``, the batch generator alone does not.
        """
        self._keeps_prefixes = keeps_prefixes
        self._settings, self._step = settings, settings.prefill_step
        self._chunk = max(self._step, at_once)
        self._windows = tuple((limit, 0) for limit in windows)
        # A cache that can be trimmed takes the place of its own prefixes (LRUPromptCache).
        self._longest_trimmed = min(windows, default=2**62) - 1 if not has_states else 0
        self._coming = deque(_Row(*each) for each in enumerate(requests))
        self._waiting: deque[_Row] = deque()
        self._prompts: list[_Row] = []
        self._decoding: list[_Row] = []
        self._prompt_buffer: Buffer | None = None
        self._decode_buffer: Buffer | None = None
        # Rows that leave or join are copied by the next call: until then these are in memory.
        self._decode_parts: tuple[Buffer, ...] = ()
        self._stored: dict[tuple[int, str], Buffer] = {}
        self._last_prefix: Buffer | None = None  # a variable of the server's loop
        self._finished: list[tuple[_Row, Buffer]] = []
        self._responses: tuple[Buffer, ...] = ()  # the loop's variable until the next call ends
        # Prompts join the rows that are ready to decode, which leave at once: a chunk is computed
        # from a part of that buffer.
        self._joined: Buffer | None = None
        self.waited = 0
        """Requests that found no room when they arrived."""
        self._arrive(clients)

    def moments(self) -> Iterator[Moment]:
        """Yield the moments in which the most can be in memory, until every request has ended."""
        while self._waiting or self._prompts or self._decoding:
            self._skip()
            yield from self._decode()
            yield from self._start_decoding()
            yield from self._prefill()
            self._store()
            yield self._moment()

    def _empty(self, rows: int) -> Buffer:
        return Buffer(rows, self._windows)

    def _arrive(self, count: int) -> None:
        for _ in range(min(count, len(self._coming))):
            open_ = len(self._decoding) + len(self._prompts) + len(self._waiting)
            self.waited += open_ >= self._settings.rows
            self._waiting.append(self._coming.popleft())

    def _skip(self) -> None:
        """Make the calls that differ from the next one in nothing but smaller buffers."""
        changes = self._responses or (self._waiting and self._room)
        full = len(self._decoding) >= self._settings.rows
        # A first chunk can take more than those after it: it makes what a class keeps for itself.
        if not self._prompts or changes or full or not all(row.done for row in self._prompts):
            return
        chunks = min((row.prefix - row.done) // self._chunk for row in self._prompts)
        steps = (row.max_tokens - row.generated for row in self._decoding)
        calls = min(chunks, *steps) - 1 if self._decoding else chunks - 1
        if calls < 1:
            return
        if self._decode_buffer:
            self._decode_buffer = self._decode_buffer.decoded(calls)
            self._decode_parts = (self._decode_buffer,)
        for row in self._decoding:
            row.generated += calls
        for row in self._prompts:
            row.done += calls * self._chunk
        buffer = self._prompt_buffer or self._empty(len(self._prompts))
        self._prompt_buffer = buffer.grown(calls * self._chunk, self._step)

    @property
    def _room(self) -> int:
        """Prompts that may join those that are prefilled."""
        settings = self._settings
        return min(
            settings.prompt_concurrency - len(self._prompts),
            settings.rows - len(self._decoding),
        )

    def _decode(self) -> Iterator[Moment]:
        """Generate until something else happens: a call, or all calls until a request ends."""
        if not self._decoding or not self._decode_buffer:
            return
        calls = min(row.max_tokens - row.generated for row in self._decoding)
        full = len(self._decoding) >= self._settings.rows
        if self._prompts or (self._waiting and not full):
            calls = 1
        # A buffer that the prompt cache keeps is copied before it is written again.
        self._decode_buffer = self._decode_buffer.decoded(calls)
        self._decode_parts = (self._decode_buffer,)
        for row in self._decoding:
            row.generated += calls
        yield self._moment(stepped=self._decode_buffer)
        ended = [row for row in self._decoding if row.generated >= row.max_tokens]
        if ended:
            self._finished = [(row, self._decode_buffer) for row in ended]
            self._decoding = [row for row in self._decoding if row not in ended]
            longest = max((row.tokens for row in self._decoding), default=0)
            left = len(self._decoding)
            self._decode_buffer = self._decode_buffer.kept(left, longest) if left else None
            # Nothing refers to the buffer of a batch without rows but what was stored of it.
            self._decode_parts = self._decode_parts if left else ()

    def _start_decoding(self) -> Iterator[Moment]:
        """Admit prompts, and move those that are prefilled to the decoding batch."""
        if len(self._decoding) >= self._settings.rows:
            return
        room = min(self._room, len(self._waiting))
        admitted = [self._waiting.popleft() for _ in range(room)]
        self._joined = None
        if admitted and self._prompt_buffer:
            self._prompt_buffer = self._empty(len(admitted)).joined(self._prompt_buffer)
            self._joined = self._prompt_buffer
        self._prompts += admitted
        ready = [row for row in self._prompts if row.done == row.prefix]
        if not ready:
            return
        self._prompts = [row for row in self._prompts if row.done < row.prefix]
        buffer = self._prompt_buffer or self._empty(len(ready))
        moved = buffer.kept(len(ready), max(row.prefix for row in ready))
        if self._prompts:
            longest = max(row.done for row in self._prompts)
            self._prompt_buffer = buffer.kept(len(self._prompts), longest)
        else:
            self._prompt_buffer = None
        self._decoding += ready
        # Its first step is computed at once (GenerationBatch.__init__).
        moved = moved.grown(1)
        self._decode_parts += (moved,)
        self._decode_buffer = moved.joined(self._decode_buffer)
        yield self._moment(stepped=moved)

    def _prefill(self) -> Iterator[Moment]:
        """Prefill the next chunk of every prompt."""
        if not self._prompts or len(self._decoding) >= self._settings.rows:
            return
        step = self._chunk
        chunk = min(step, max(row.prefix - row.done for row in self._prompts))
        before = self._prompt_buffer or self._empty(len(self._prompts))
        self._prompt_buffer = None
        padded = any(row.prefix - row.done < chunk for row in self._prompts)
        grown = before.grown(chunk, self._step, padded=padded)
        yield self._moment(*((self._joined,) if self._joined else ()), prefilled=grown)
        self._prompt_buffer = grown
        for row in self._prompts:
            row.done = min(row.prefix, row.done + step)

    def _store(self) -> None:
        """Put prefixes, then whole conversations into the prompt cache."""
        for row in self._prompts:
            # Once: a row can wait here for a place in the decoding batch while it is evicted.
            if self._keeps_prefixes and row.done == row.prefix and not row.is_stored:
                row.is_stored = True
                buffer = self._prompt_buffer or self._empty(1)
                self._last_prefix = buffer
                self._insert((row.number, "prefix"), buffer)
        for row, buffer in self._finished:
            if row.tokens <= self._longest_trimmed:
                self._stored.pop((row.number, "prefix"), None)
            self._insert((row.number, "whole"), buffer)
        self._responses = tuple(buffer for _, buffer in self._finished)
        self._arrive(len(self._finished))
        self._finished = []

    def _insert(self, key: tuple[int, str], buffer: Buffer) -> None:
        self._stored[key] = buffer
        if len(self._stored) > self._settings.prompt_cache_size:
            del self._stored[next(iter(self._stored))]

    def _moment(
        self, *more: Buffer, prefilled: Buffer | None = None, stepped: Buffer | None = None
    ) -> Moment:
        named = (self._last_prefix, *self._responses, *self._decode_parts, self._prompt_buffer)
        ended = (buffer for _, buffer in self._finished)
        held = (*self._stored.values(), *ended, *named, *more)
        once = {id(buffer): buffer for buffer in held if buffer}
        return Moment(
            tuple(once.values()),
            prefilled.rows if prefilled else 0,
            prefilled.index if prefilled else 0,
            stepped.rows if stepped else 0,
            stepped.index if stepped else 0,
            len(self._decoding),
            len(self._stored),
        )
