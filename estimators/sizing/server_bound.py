"""The most that mlx_lm.server takes, whatever the order of its requests.

docs/server.md derives it from mlx-lm 0.32.2: generate.py (BatchGenerator), models/cache.py
(LRUPromptCache and the caches of batches), server.py (ResponseGenerator._generate). Nothing is
simulated: a few moments are compared that contain every one the server can be in.
"""

from collections.abc import Iterator
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.specs import STEP, Growth
from memfit.estimators.base import dtypes
from memfit.estimators.base.units import ceil_div, round_down, round_up
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.mlx.call_plan import CHUNKS, buffer_bytes, prefilled_alone
from memfit.estimators.mlx.kv_cache import BatchBuffer
from memfit.estimators.results.estimate import Limit
from memfit.estimators.results.server import ServerMoment
from memfit.estimators.runtimes.held import held_limit, most_held_bytes
from memfit.estimators.runtimes.runtime import Need
from memfit.estimators.sizing.sized_model import (
    SizedModel,
    draft_bytes_of,
    error_bytes_of,
    for_phases,
    kept_of,
)

_BETWEEN_LENGTHS = 128
"""Tokens between the single chunks that are compared."""


def need_of(moment: ServerMoment) -> Need:
    """Return what a moment needs, with its error."""
    return Need(moment.needed_bytes, 0, error_bytes=moment.prefill_error_bytes)


def held_limits(bound: "ServerBound", settings: ServerSettings) -> tuple[Limit, ...]:
    """Return what a server holds over its life, on a machine that it shares."""
    sized = bound.memory.sized
    if sized.device is None or sized.device.backend != "metal":
        return ()
    peak_bytes = bound.moment(settings).needed_bytes - sized.margin_bytes
    remedy = "fewer requests that decode together (--decode-concurrency) leave less"
    return tuple(held_limit(peak_bytes, bound.held_bytes(settings), sized.device, remedy=remedy))


def one_at_a_time(sized: SizedModel, workload: Workload) -> str | None:
    """Return why the server runs one request at a time, None where it batches (server.py)."""
    if workload.kv_bits is not None:
        return "KV bits switch batching off"
    if sized.draft:
        return "a draft model switches batching off"
    # Their classes have no merge() (server.py, ModelProvider._load).
    if any(b.growth in (Growth.CHUNKED, Growth.ROWS) for b in sized.model.kv_buffers()):
        return "a cache in chunks or compressed rows cannot be batched"
    return None


def server_moment(
    weights_bytes: int,
    margin_bytes: int,
    held_bytes: int,
    *,
    images: int = 0,
    logits: int = 0,
    prefill: tuple[int, int] = (0, 0),
    prompts: int,
    decoding: int,
    stored: int = 0,
) -> ServerMoment:
    """Return a moment: bytes of caches, of images, of logits, and of a chunk with its error."""
    nbytes, error = prefill
    return ServerMoment(
        needed_bytes=weights_bytes + held_bytes + images + logits + nbytes + margin_bytes,
        weights_bytes=weights_bytes,
        cache_bytes=held_bytes,
        images_bytes=images,
        logits_bytes=logits,
        prefill_bytes=nbytes,
        prefill_error_bytes=error,
        margin_bytes=margin_bytes,
        prefilled_prompts=prompts,
        decoding_requests=decoding,
        stored_caches=stored,
    )


class ServerMemory:
    """Bytes of one model's server; figures of equal buffers and chunks are computed once."""

    def __init__(self, sized: SizedModel, workload: Workload) -> None:
        """Take a model and the format of its caches; lengths and steps come with each question."""
        self.sized, self._workload = sized, workload
        self._chunks = for_phases(sized, CHUNKS)
        counts = sized.model.kv_buffer_counts
        self.windows = frozenset(buffer.limit for buffer in counts if buffer.limit)
        self.has_states = any(sized.model.states())
        self._weights_bytes = sized.resident_bytes
        self.layers = max(1, sum(counts.values()))
        self.cache_bytes = cache(partial(buffer_bytes, sized.model, workload))
        self.prefill = cache(self._prefill)

    def logits_bytes(self, rows: int, *, prefilling: bool) -> int:
        """Return the bytes of the logits and log-probabilities of requests that decode.

        GenerationBatch keeps the log-probabilities of two steps (generate.py, _step); a step
        computes them from logits and their difference.
        """
        model = self.sized.model
        return dtypes.nbytes(rows * model.vocab_size, model.dtype) * (2 if prefilling else 4)

    def chunk(self, prompts: BatchBuffer, step: int, end: int | None = None) -> tuple[int, int]:
        """Return the bytes of a chunk of ``prompts`` with their caches, and the error of that.

        The chunk ends at the last token written, or at another ``end``.
        """
        end = prompts.index if end is None else end
        nbytes, error = self.prefill(prompts.rows, end, step)
        empty = BatchBuffer(prompts.rows, tuple((limit, 0) for limit, _ in prompts.windows))
        # The caches may have more room than those of prompts that begin together.
        counted = self.cache_bytes(empty.grown(end, step))
        return nbytes + max(0, self.cache_bytes(prompts) - counted), error

    def _prefill(self, rows: int, tokens: int, step: int) -> tuple[int, int]:
        """Return the bytes of the chunks of prompts with their caches, and the error of that."""
        largest = self._chunk_bytes(rows, tokens, step)
        # A single prompt has the caches of a batch too, which mask padding.
        if rows == 1:
            nbytes, error = self._chunk_bytes(2, tokens, step)
            largest = max(largest, (ceil_div(nbytes, 2), ceil_div(error, 2)))
        return largest

    def _chunk_bytes(self, rows: int, tokens: int, step: int) -> tuple[int, int]:
        workload = replace(prefilled_alone(self._workload, rows, tokens), prefill_step=step)
        moment = self._chunks.figures_for(workload).moment
        most = moment.nbytes if moment.prefill_bytes is None else moment.prefill_bytes
        return most - self.sized.resident_bytes, error_bytes_of(self._chunks, workload)

    def answer(self, held_bytes: int, **parts: Any) -> ServerMoment:
        """Return a moment of this model, as `server_moment`."""
        return server_moment(self._weights_bytes, self.sized.margin_bytes, held_bytes, **parts)

    def alone(
        self, settings: ServerSettings, prompt_tokens: int, max_tokens: int, stored: int
    ) -> ServerMoment:
        """Return the most where one request runs at a time and ``stored`` caches like its are kept.

        Every cache is stored as it is, with that of a draft model (server.py, _serve_single).
        """
        workload = replace(
            self._workload,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            prefill_step=settings.prefill_step,
        )
        sized, figures = self.sized, self.sized.figures_for(workload)
        cached = [figures, *([sized.draft.figures_for(workload)] if sized.draft else [])]
        kept_bytes = stored * sum(each.kv.nbytes + each.ssm_bytes for each in cached)
        run = figures.moment.nbytes + draft_bytes_of(sized, workload) - sized.resident_bytes
        error = error_bytes_of(sized, workload)
        return self.answer(kept_bytes, prefill=(run, error), prompts=1, decoding=0, stored=stored)


class ServerBound:
    """The bound for one model whose requests are at most as long as a workload, for any flags."""

    def __init__(
        self,
        sized: SizedModel,
        workload: Workload,
        clients: int,
        memory: ServerMemory | None = None,
    ) -> None:
        """Take the longest request, how many are open at a time, and a memory with such caches."""
        self.memory = memory or ServerMemory(sized, workload)
        self._workload, self.clients = workload, clients
        self.is_sequential = one_at_a_time(sized, workload) is not None
        self._moments: dict[ServerSettings, ServerMoment] = {}

    def moment(self, settings: ServerSettings) -> ServerMoment:
        """Return the largest moment that these flags allow: what no order of requests exceeds.

        Raises:
            UnsupportedError: when mlx-lm cannot run the workload.
        """
        if settings not in self._moments:
            self._moments[settings] = self._largest(settings)
        return self._moments[settings]

    def _largest(self, settings: ServerSettings) -> ServerMoment:
        prompt, reply = self._workload.prompt_tokens, max(1, self._workload.max_tokens)
        if self.is_sequential:
            return self.memory.alone(settings, prompt, reply, settings.prompt_cache_size)
        limits = _Limits(self.memory, settings, self.clients, prompt, reply)
        return max(limits.moments(), key=lambda moment: moment.needed_bytes)

    def kept_bytes(self, settings: ServerSettings) -> int | None:
        """Return the most freed bytes that MLX keeps beside a moment, None where not known."""
        prompt, reply = self._workload.prompt_tokens, max(1, self._workload.max_tokens)
        if self.is_sequential:
            alone = replace(self._workload, max_tokens=reply, prefill_step=settings.prefill_step)
            return kept_of(self.memory.sized, alone)
        return _Limits(self.memory, settings, self.clients, prompt, reply).kept_bytes()

    def held_bytes(self, settings: ServerSettings) -> int | None:
        """Return the most bytes in use and kept, whatever the order of requests; None: not known.

        Without the margin.
        """
        sized, kept = self.memory.sized, self.kept_bytes(settings)
        peak_bytes = self.moment(settings).needed_bytes - sized.margin_bytes
        return most_held_bytes(
            peak_bytes, None if kept is None else peak_bytes + kept, sized.device
        )


class _Limits:
    """The largest buffers of a server, and the moments in which the most of them exist."""

    def __init__(
        self, memory: ServerMemory, settings: ServerSettings, clients: int, prompt: int, reply: int
    ) -> None:
        self.memory, self.settings, self.clients = memory, settings, clients
        self.prompt, self.longest = prompt, prompt + reply
        self._entries = settings.prompt_cache_size
        self._prompts = min(clients, settings.prompt_concurrency)
        # Requests that decode or are prefilled: BatchGenerator._next admits no more prompts.
        self._together = min(clients, settings.rows + settings.prompt_concurrency - 1)
        # The last token of a prompt is decoded.
        self._chunk = min(settings.prefill_step, prompt - 1)
        self._prefill = cache(self._prefill_bytes)
        self._decoded = cache(self._decoded_bytes)
        self._prefilled = cache(self._prefilled_bytes)

    @cached_property
    def _slack(self) -> int:
        """Tokens that a batch of prompts has room for beyond those written.

        A batch whose rows leave while others join keeps its room (BatchKVCache.filter), and grows
        by whole steps as soon as a chunk is longer than that.
        """
        most = max(STEP, round_up(self._chunk, STEP)) - 1
        return most if self._prompts > 1 else min(most, 2 * STEP - 2)

    @cached_property
    def _index(self) -> int:
        """Tokens written to a batch of prompts: a row that ends first is padded to whole chunks."""
        prefix, step = self.prompt - 1, self.settings.prefill_step
        return round_up(prefix, step) if self._prompts > 1 and prefix > step else prefix

    @cached_property
    def _trims(self) -> bool:
        """Whether a stored reply takes the place of its own prefixes (can_trim_prompt_cache)."""
        memory = self.memory
        return not memory.has_states and all(limit > self.longest for limit in memory.windows)

    def _decoded_bytes(self, rows: int) -> int:
        """Bytes of a decoding batch."""
        longest = self.longest
        room = max(longest + STEP - 1, self.prompt + self._slack)
        # Rows that leave a batch do not shorten its windows (BatchRotatingKVCache.filter).
        tokens = longest + STEP - 1 if self._together == 1 else None
        windows = self._windows(0, tokens)
        return self.memory.cache_bytes(BatchBuffer(rows, windows, longest, room, longest, 1))

    def _short(self, rows: int) -> int:
        """Bytes of rows that decode the only token of their prompts."""
        room = STEP + self._slack
        return self.memory.cache_bytes(
            BatchBuffer(max(0, rows), self._windows(0, room), 1, room, 1, 1)
        )

    def _prefilled_bytes(self, rows: int) -> int:
        """Bytes of a batch of prompts after a chunk."""
        return self.memory.cache_bytes(self._batch(rows)) if self._index else 0

    def _joined(self, rows: int) -> int:
        """Bytes of a batch that prompts joined: a copy, which no state is a slice of."""
        return self.memory.cache_bytes(replace(self._batch(rows), viewed=0)) if rows > 1 else 0

    def _batch(self, rows: int) -> BatchBuffer:
        chunk, index = self._chunk, self._index
        windows = self._windows(chunk - 1, index if self._prompts == 1 else None)
        return BatchBuffer(rows, windows, index, index + self._slack, index, chunk)

    def _windows(self, more: int, tokens: int | None) -> tuple[tuple[int, int], ...]:
        limits = sorted(self.memory.windows)
        return tuple((each, min(each + more, tokens or each + more)) for each in limits)

    def _prefill_bytes(self, rows: int) -> tuple[int, int]:
        """Bytes of a chunk of prompts with their caches, and the error of that.

        It does not grow with every token: the last two of a prompt and whole chunks are compared,
        and shorter prompts where there is one chunk, whose operations in flight are fewer at once.
        """
        if self.prompt == 1:
            return 0, 0
        step, index = self.settings.prefill_step, self._index
        ends = {max(1, self.prompt - 2), self.prompt - 1, index, round_down(index, step) or index}
        if index <= step:
            ends.update(range(index, 0, -_BETWEEN_LENGTHS))
        return max(self._chunk_bytes(self._batch(rows), step, end) for end in ends)

    def _chunk_bytes(self, batch: BatchBuffer, step: int, end: int) -> tuple[int, int]:
        """Bytes of a chunk; with states, whose convolutions rise and fall with its length."""
        nbytes, error = self.memory.chunk(batch, step, end)
        return (nbytes + error, 0) if self.memory.has_states else (nbytes, error)

    def kept_bytes(self) -> int:
        """Return the most that is freed before it is given back.

        BatchGenerator clears after a chunk of prompts, else every 512 decode steps (generate.py,
        _next). What is in use at that time and all that is allocated until the next is the most
        that is held then: caches of prompts, merged and split; a decoding batch that has grown
        twice, one that others join, and one for each row that leaves it.
        """
        rows, decoded = self._together, self._decoded(self._together)
        # The batches that rows leave have one row less each.
        shared = decoded + ceil_div(decoded * (rows - 1), 2) if rows > 1 else 0
        return 2 * self._prefilled(self._prompts) + 2 * decoded + shared

    @cached_property
    def _kept(self) -> int:
        """The most that the entries of the prompt cache keep: a batch each.

        Replies of equal texts share an entry, and so do those that leave a batch together: even if
        every client is away, each entry can be of a batch of all of them. A prefix that its own
        reply will replace is of a request that decodes, which the prompts after it are without.
        """
        count = self._entries
        rows = [self._prompts] * count
        if self._trims:
            rows = [min(self._prompts, self.clients - each) for each in range(self.clients)][:count]
        reply = self._decoded(self._together)
        prefixes = sum(max(reply, self._prefilled(each)) for each in rows)
        return prefixes + (count - len(rows)) * reply

    @cached_property
    def _row(self) -> int:
        """Bytes of the row of an entry that a request continues: its first call computes it."""
        windows, tokens = self._windows(0, None), self.longest
        row = BatchBuffer(1, windows, tokens, tokens, tokens, self._chunk, self._together)
        return self.memory.cache_bytes(row)

    def _hits(self, begins: int, rows: int, idle: int, begun: int = 0) -> int:
        """Bytes of what requests keep that begin with an entry.

        Prompts that begin copy its row, the batch beside it. Those and all that wait can keep the
        batch of an entry that was dropped. At most as many as entries are older than the first of
        these requests; the others are of replies that ended while it waited, each with fewer rows.
        """
        if not self._entries:
            return 0
        keeping = self.clients - idle - rows - begun if self._waits else 0
        if keeping <= 0:
            return begins * self._row
        ended = sorted(self._ended(rows, each) for each in range(1, keeping + idle))[::-1]
        if self.clients <= self.settings.rows:
            ended = list(map(min, ended, self._in_calls))
        prefix = self._prefilled(self._prompts)
        since = sorted((*(max(prefix, self._decoded(each)) for each in ended), prefix))
        return begins * self._row + sum(since[::-1][:keeping])

    def _ended(self, rows: int, since: int) -> int:
        """Rows of the batch that so many replies before the present ``rows`` ended in.

        A request waits while as many decode as may, or as many prompts are prefilled.
        """
        before = rows + since
        if since > 1 and before <= self.settings.rows:
            before -= self.settings.prompt_concurrency
        return max(0, min(self._together, before))

    @cached_property
    def _in_calls(self) -> list[int]:
        """The most rows of the batches in which replies end while a request waits for prompts.

        One ends in each of the calls that a prompt takes. It waits longer only behind others, which
        do not decode meanwhile. In the call in which it begins those prompts decode.
        """
        calls = ceil_div(self.prompt - 1, self.settings.prefill_step) + 1
        prompts = self.settings.prompt_concurrency
        rows = (
            most - call
            for most in range(self.clients - prompts - 1, 0, -prompts)
            for call in range(min(calls, most))
        )
        return sorted((self.clients - 1, *rows), reverse=True)

    @cached_property
    def _waits(self) -> bool:
        """Whether a request can wait while others are prefilled or decode."""
        return self.clients > self.settings.prompt_concurrency

    def _fewer(self, prompts: int, rows: int) -> tuple[int, ...]:
        """Rows that decode: fewer where requests wait, which may keep more than a row takes."""
        waits = self._waits and prompts == self._prompts and self._entries
        return tuple(range(max(0, rows) + 1))[::-1] if waits else (rows,)

    def moments(self) -> Iterator[ServerMoment]:
        """Yield a moment of each kind, the largest of its kind among them."""
        for prompts in range(self._prompts + 1):
            yield from self._decoding(prompts)
            yield from self._prefilling(prompts)

    def _decoding(self, prompts: int) -> Iterator[ServerMoment]:
        """A step of the decoding batch beside prompts between two chunks."""
        # Without entries a variable keeps the batch of a reply that has just ended.
        for (last, idle), ended in product(self._last(), (0,) if self._entries else (0, 1)):
            most = min(self._together - prompts, self.clients - prompts - idle - ended)
            for rows in self._fewer(prompts, most):
                if rows >= 0:
                    yield from self._step(prompts, rows, last, idle, ended)

    def _step(
        self, prompts: int, rows: int, last: int, idle: int, ended: int
    ) -> Iterator[ServerMoment]:
        held_bytes = last + self._prefilled(prompts) + self._decoded(rows)
        held_bytes += self._decoded(min(self._together, rows + 1)) if ended else 0
        held_bytes += self._hits(0, rows, idle, prompts)
        # One layer after the other grows.
        grown = held_bytes + ceil_div(self._decoded(rows), self.memory.layers)
        yield self._moment(self._kept + grown, prompts, rows)
        if rows > 1:
            beside = self._at_join(idle) if last else self._kept
            joined = held_bytes - last + beside + self._decoded(rows)
            yield self._moment(joined, prompts, rows)

    def _at_join(self, idle: int) -> int:
        """Bytes of entries and of the last prefix when rows have joined, one of them of that.

        A row decoded beside the batch of that prefix, as did the idle clients. Where it is no entry
        since as many replies as entries ended, these ended in the two calls since.
        """
        last = self._prefilled(max(0, min(self._prompts, self.clients - idle - 1)))
        if idle < self._entries:
            return last + self._kept
        return last + min(2, self._entries) * self._decoded(self._together - 1)

    def _last(self) -> Iterator[tuple[int, int]]:
        """Bytes of the last stored prefix in a variable, and clients that are idle then.

        A request that arrives drops it (server.py, ``del cache``). It is an entry too until its
        own reply ended or as many replies as there are entries.
        """
        yield 0, 0
        last = self._prefilled(self._prompts)
        if self._trims and self._entries:
            yield last, 1
        yield last, self._entries

    def _prefilling(self, prompts: int) -> Iterator[ServerMoment]:
        """A chunk, beside rows that just left for the decoding batch and replies that end."""
        waits = self._waits
        for last, idle in self._last():
            others = self.clients - prompts - idle
            for rows, ended, chunk in self._beside(prompts, others):
                # In a call in which replies end, prompts of one token take their places at once.
                short = self._short(min(self._prompts - prompts, others - rows))
                for moved in range(min(self._prompts - prompts, rows) + 1):
                    # The row of the last prefix left this batch before. Or now: as many replies as
                    # entries dropped that prefix, or one of its own text did while others waited.
                    apart = waits or idle >= self._entries if moved else prompts < self.clients
                    if last and not apart:
                        continue
                    # Who joins now arrived before that prefix was stored, and waited for a place.
                    joins = waits or moved or not last
                    before = self._joined(prompts + moved) if joins else 0
                    held_bytes = last + before + short + self._decoded(rows) + ended
                    held_bytes += self._hits(prompts, rows, idle)
                    yield self._moment(self._kept + held_bytes, prompts, rows, chunk)

    def _beside(self, prompts: int, others: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Rows that decode beside a chunk, bytes of a batch whose reply has ended, and the chunk.

        Without entries a variable keeps that batch for one call: a prompt that begins in it has its
        first chunk, and one that has begun before has taken a place beside that batch.
        """
        chunk, together = self._prefill(prompts) if prompts else (0, 0), self._together
        rows = min(together, others)
        if rows >= 0:
            yield from ((each, 0, chunk) for each in self._fewer(prompts, rows))
        if self._entries or rows < 0:
            return
        if prompts:
            yield rows, self._decoded(min(together, rows + 1)), self._first(prompts)
            together -= 1
        fewer = min(together, others - (prompts <= 1))
        if fewer >= 0:
            yield fewer, self._decoded(min(together, fewer + 1)), chunk

    def _first(self, rows: int) -> tuple[int, int]:
        """Bytes of the first chunk of prompts."""
        chunk = self._chunk
        if not chunk or not rows:
            return 0, 0
        windows = self._windows(chunk - 1, None)
        batch = BatchBuffer(rows, windows, chunk, chunk + self._slack, chunk, chunk)
        return self._chunk_bytes(batch, self.settings.prefill_step, chunk)

    def _moment(
        self, held_bytes: int, prompts: int, decoding: int, chunk: tuple[int, int] = (0, 0)
    ) -> ServerMoment:
        is_prefilling = chunk != (0, 0)
        return self.memory.answer(
            held_bytes,
            prefill=chunk,
            logits=self.memory.logits_bytes(decoding + prompts, prefilling=is_prefilling),
            prompts=prompts if is_prefilling else 0,
            decoding=decoding,
            stored=self._entries,
        )
