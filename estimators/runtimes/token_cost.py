"""What one token adds to a cache: the layers that keep it, and their bytes."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from memfit.estimators.arch.specs import Growth, KVBuffer, Mixer


class TokenCost(Struct, frozen=True):
    """Equal layers, and the bytes of a token in one of them."""

    layers: int
    token_bytes: int
    window: int | None = None
    """The last tokens that the layers need; None for all."""
    most_tokens: int | None = None
    """The largest capacity of one layer, where a window limits it."""

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.token_bytes

    def needed_tokens(self, tokens: int) -> int:
        """Return the tokens still needed after ``tokens`` have passed."""
        return tokens if self.window is None else min(tokens, self.window)

    def allocated_tokens(self, capacity: int) -> int:
        """Return what a window leaves of a capacity."""
        return capacity if self.most_tokens is None else min(capacity, self.most_tokens)

    def needed_bytes(self, tokens: int) -> int:
        """Return the bytes still needed after ``tokens`` have passed."""
        return self.bytes_per_token * self.needed_tokens(tokens)

    def allocated_bytes(self, capacity: int) -> int:
        return self.bytes_per_token * self.allocated_tokens(capacity)


def attention_buffers(mixers: Iterable[Mixer]) -> Iterator[KVBuffer]:
    """Yield the buffers of layers that attend, with windows that mlx-lm may not use."""
    for mixer in mixers:
        growth = Growth.STEPS if mixer.window is None else Growth.ROTATING
        for buffer in mixer.kv_buffers() if mixer.owns_cache else ():
            yield KVBuffer(buffer.heads, buffer.key_dim, buffer.value_dim, growth, mixer.window)
