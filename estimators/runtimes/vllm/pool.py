"""vLLM's pool of KV blocks: one size of block for every layer, shared by all requests.

Source: vLLM 0.33.0 (4ba787ec9), v1/core/kv_cache_planning.py, v1/kv_cache_interface.py and
platforms/interface.py.
"""

from bisect import bisect_right
from collections.abc import Sequence

from msgspec import Struct

from memfit.estimators.runtimes.token_cost import TokenCost

BLOCK = 16  # config/cache.py, DEFAULT_BLOCK_SIZE
# The state of a recurrent layer and its last checkpoint: prefix caching is on (MambaSpec,
# max_memory_usage_bytes); a model without attention has no prefix caching.
_STATES_CACHED, _STATES_ALONE = 2, 1


class LayerGroup(Struct, frozen=True, kw_only=True):
    """Layers that take their blocks together."""

    block_tokens: int
    """Tokens of a block; 0 for recurrent states."""
    blocks: int = 0
    """Blocks of a request that do not depend on its tokens."""
    window: int | None = None
    """The most tokens that are kept, in flight included; None for all."""

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a request of so long a context takes."""
        if not self.block_tokens:
            return self.blocks
        kept = tokens if self.window is None else min(tokens, self.window)
        return -(-kept // self.block_tokens) + self.blocks


class BlockLayout(Struct, frozen=True):
    """The blocks of a model's cache."""

    block_bytes: int
    groups: tuple[LayerGroup, ...]

    def request_bytes(self, tokens: int, *, states: bool | None = None) -> int:
        """Return the bytes of a request's blocks: of states, of tokens, or of both."""
        chosen = (g for g in self.groups if states is None or (not g.block_tokens) is states)
        return self.block_bytes * sum(group.blocks_for(tokens) for group in chosen)

    def allocated_tokens(self, tokens: int) -> int:
        """Return the tokens of the blocks that a request's longest layer takes."""
        return max((g.block_tokens * g.blocks_for(tokens) for g in self.groups), default=0)

    def longest(self, nbytes: int, most: int) -> int:
        """Return the most tokens of one request, in full blocks, that ``nbytes`` hold."""
        step = max((group.block_tokens for group in self.groups), default=0)
        if not step:
            return most
        counts = range(1, most // step + 1)
        return step * bisect_right(counts, nbytes, key=lambda n: self.request_bytes(n * step))


def block_layout(costs: Sequence[TokenCost], states: Sequence[int], in_flight: int) -> BlockLayout:
    """Return the layout of a model: what each layer caches for a token, and for its state.

    ``in_flight`` are the tokens that can be scheduled and not yet computed.
    """
    page = max(states, default=0)
    if page and not costs:
        return BlockLayout(len(states) * page, (LayerGroup(block_tokens=0, blocks=_STATES_ALONE),))
    windows = {cost.window for cost in costs}
    if not page and len(windows) == 1:
        nbytes = BLOCK * sum(cost.bytes_per_token for cost in costs)
        return BlockLayout(nbytes, (_tokens(costs[0].window, BLOCK, in_flight),))
    return _unified(costs, len(states), page, in_flight)


def _unified(costs: Sequence[TokenCost], states: int, page: int, in_flight: int) -> BlockLayout:
    """Layers of several kinds: pages of one size, groups of one number of layers."""
    token = max(cost.token_bytes for cost in costs)
    # interface.py, _align_hybrid_block_size: a page of tokens is at least one of a state.
    block = BLOCK * max(1, -(-page // (BLOCK * token)))
    largest = block * token
    kinds = [(cost.layers, _of_page(cost, block, largest, in_flight)) for cost in costs]
    if states:
        kinds.append((states, LayerGroup(block_tokens=0, blocks=_STATES_CACHED)))
    layers = [count for count, _ in kinds]
    # _get_kv_cache_groups_uniform_page_size: the smallest kind, unless all are about as large.
    size = max(layers) if 2 * max(layers) < 3 * min(layers) else min(layers)
    groups = (group for count, group in kinds for _ in range(-(-count // size)))
    return BlockLayout(size * largest, tuple(groups))


def _of_page(cost: TokenCost, block: int, largest: int, in_flight: int) -> LayerGroup:
    """unify_kv_cache_spec_page_size: more tokens in a block where that fills the page."""
    ratio, rest = divmod(largest, block * cost.token_bytes)
    return _tokens(cost.window, block if rest else block * ratio, in_flight)


def _tokens(window: int | None, block: int, in_flight: int) -> LayerGroup:
    if window is None:
        return LayerGroup(block_tokens=block)
    # SlidingWindowSpec: a window need not begin with a block.
    return LayerGroup(block_tokens=block, blocks=1, window=window - 1 + in_flight)


def graph_counts(largest: int, requests: int) -> tuple[int, int]:
    """Return how many sizes of batches CUDA graphs are captured for, and how many of decoding.

    Source: config/vllm.py, _set_cudagraph_sizes.

    >>> graph_counts(512, 256)
    (51, 35)
    """
    most = min(2 * requests, largest)
    sizes = {1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16), requests}
    captured = [size for size in sizes if size <= most]
    return len(captured), sum(size <= requests for size in captured)
