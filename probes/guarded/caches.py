"""mlx-lm's stored caches and batches, without anything that keeps more memory than it says.

Sources: mlx-lm 0.32.2 cache.py (LRUPromptCache, extract), generate.py (PromptProcessingBatch,
GenerationBatch). Every copy is computed at once, layer by layer: then no part of a batch stays in
memory beside its copy, and a stored cache keeps its own bytes alone.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    LRUPromptCache,
    PromptTrie,
    can_trim_prompt_cache,
    trim_prompt_cache,
)


def arrays(value: Any) -> Iterator[mx.array]:
    """Yield the arrays of a cache's state."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from arrays(each)


def held_bytes(caches: Iterable[Any]) -> int:
    """Return the bytes of caches that are computed."""
    return sum(each.nbytes for cache in caches for each in arrays(cache.state))


def settle(*batches: Sequence[Any]) -> None:
    """Compute the caches of batches, one layer of all of them after the other."""
    for layer in range(max(map(len, batches), default=0)):
        states = [batch[layer].state for batch in batches if layer < len(batch)]
        mx.eval(list(arrays(states)))


def own(caches: Iterable[Any]) -> None:
    """Compute the caches of one row, so that nothing keeps the batch that they were cut from."""
    for cache in caches:
        parts = cache.caches if isinstance(cache, CacheList) else (cache,)
        for part in parts:
            if isinstance(part, ArraysCache):  # a slice of a state shares the buffer of all rows
                part.cache = [None if each is None else mx.contiguous(each) for each in part.cache]
        mx.eval(list(arrays(cache.state)))


class _Trie(PromptTrie):  # type: ignore[misc]
    """Entries by their tokens; one that is dropped is marked."""

    def add(self, model: Any, tokens: list[int], value: Any) -> Any:
        """Add an entry, and return the one in its place before."""
        return _dropped(super().add(model, tokens, value))

    def pop(self, model: Any, tokens: list[int]) -> Any:
        """Drop an entry."""
        return _dropped(super().pop(model, tokens))

    def pop_prefixes(self, model: Any, tokens: list[int]) -> list[tuple[int, Any]]:
        """Drop the entries of all beginnings."""
        found = list(super().pop_prefixes(model, tokens))
        for _, entry in found:
            _dropped(entry)
        return found


def _dropped(entry: Any) -> Any:
    if entry is not None:
        entry.is_dropped = True
    return entry


class StoredCaches(LRUPromptCache):  # type: ignore[misc]
    """Stored caches, each kept only where ``may_store`` of its tokens allows it."""

    def __init__(self, most: int, may_store: Callable[[int], bool]) -> None:
        """Take how many are kept at most."""
        super().__init__(most)
        self._trie = _Trie()
        self._may_store = may_store
        self._numbers = count()
        self.entries: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """By number, in the order in which they were stored; gone once nothing refers to them."""
        self.approved: dict[int, tuple[list[Any], int]] = {}
        """Replies that may be stored and are not yet, with their bytes."""

    def approve(self, tokens: int, caches: list[Any]) -> None:
        """Compute what a reply leaves, or drop it, before anything else is computed."""
        if self.max_size and self._may_store(tokens):
            own(caches)
            self.approved[id(caches)] = caches, held_bytes(caches)
        else:
            caches.clear()

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], **kind: Any
    ) -> None:
        """Store a cache, if it was approved or may be stored now."""
        if id(prompt_cache) not in self.approved and prompt_cache:
            self.approve(len(tokens), prompt_cache)
        self.approved.pop(id(prompt_cache), None)
        if prompt_cache:
            super().insert_cache(model, tokens, prompt_cache, **kind)
            entry = self._trie.get(model, tokens)
            entry.key = model, tokens
            entry.real_bytes, entry.is_dropped = held_bytes(prompt_cache), False
            self.entries[next(self._numbers)] = entry

    def evict(self, number: int) -> None:
        """Drop an entry."""
        entry = self.entries.get(number)
        if entry is not None and not entry.is_dropped:
            model, tokens = entry.key
            self._lru.remove(model, tokens)
            self._trie.pop(model, tokens)
            self._n_bytes -= entry.nbytes
            self._n_bytes_by_type[entry.cache_type] -= entry.nbytes

    def nearest(self, model: Any, tokens: list[int]) -> tuple[Any, int]:
        """Return the entry that a prompt begins with, and how many of its tokens are used.

        At least one token of the prompt is left; for a prompt that is an entry as a whole the
        server itself would leave none, and end.
        """
        found = self._trie.search(model, tokens)
        key, used = found.shorter or [], len(found.shorter or [])
        for longer in (found.exact, found.longer):
            common = len(tokens) if longer is found.exact else found.common_prefix
            common = min(common, len(tokens) - 1)
            if longer is not None and common > used:
                entry = self._trie.get(model, longer)
                if can_trim_prompt_cache(entry.prompt_cache):
                    return entry, common
        return (self._trie.get(model, key), used) if 0 < used < len(tokens) else (None, 0)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Return a copy of the nearest cache, and the tokens that it does not have."""
        entry, used = self.nearest(model, tokens)
        if entry is None:
            return None, tokens
        cache = copy.deepcopy(entry.prompt_cache)
        trim_prompt_cache(cache, len(entry.key[1]) - used)
        return cache, tokens[used:]


class SettledPrompts(PromptProcessingBatch):  # type: ignore[misc]
    """The batch of prompts, whose copies are computed at once."""

    def extend(self, batch: Any) -> None:
        """Add prompts."""
        super().extend(batch)
        settle(self.prompt_cache)

    def split(self, indices: list[int]) -> Any:
        """Take prompts out, which begin to decode."""
        moved = super().split(indices)
        settle(self.prompt_cache, moved.prompt_cache)
        return moved


class SettledRows(GenerationBatch):  # type: ignore[misc]
    """The decoding batch, whose copies are computed at once, and whose replies before that."""

    stored: StoredCaches
    held_bytes = 0
    """That its buffers hold, with the rows that have just ended."""

    def extend(self, batch: Any) -> None:
        """Add rows; the batch that they come from is a variable until the call ends."""
        super().extend(batch)
        batch.prompt_cache = []
        settle(self.prompt_cache)
        self.held_bytes = held_bytes(self.prompt_cache)

    def _step(self) -> Any:
        found = super()._step()
        self.held_bytes = held_bytes(self.prompt_cache)
        return found

    def next(self) -> Any:
        """Generate a token of each row."""
        responses = super().next()
        for response in responses:
            if response.prompt_cache:
                self.stored.approve(len(response.all_tokens), response.prompt_cache)
        settle(self.prompt_cache)
        self.held_bytes = held_bytes(self.prompt_cache)
        return responses


class SettledGenerator(BatchGenerator):  # type: ignore[misc]
    """The batch generator with these batches."""

    def __init__(self, stored: StoredCaches, model: Any, **settings: Any) -> None:
        """Take the stored caches, and what the server passes."""
        super().__init__(model, **settings)
        self._prompt_batch = SettledPrompts.empty(model, self.sampler, self.prefill_step_size)
        self._generation_batch = SettledRows.empty(model, self.sampler)
        self._generation_batch.stored = stored
