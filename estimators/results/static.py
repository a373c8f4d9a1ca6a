"""A plan of static allocation as data: renderers show it and compute nothing."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count, Tokens
from memfit.estimators.base.workload import CallPhase
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.result import Result

StorageMode = Literal["private", "shared"]


class CallArena(Struct, frozen=True):
    """The arena of one call of the graph."""

    phase: CallPhase
    tokens: Tokens
    position: Count
    operations: Count
    buffers: Count
    """Number of intermediates."""
    arena_bytes: Bytes
    lower_bound_bytes: Bytes
    separate_bytes: Bytes
    largest_bytes: Bytes
    input_bytes: Bytes
    output_bytes: Bytes
    constant_bytes: Bytes
    pool_bytes: Bytes
    """In the chunks of Foundry's memory pool, which frees no single buffer."""
    pool_wasted_bytes: Bytes
    """Of these, at the ends of the chunks and for alignment."""
    mlx_bytes: Bytes
    """The most that MLX's own allocator has in use for them."""


class Placement(Struct, frozen=True):
    """One intermediate in the arena, alive from operation ``first`` to ``last``."""

    operation: str
    offset: Count
    nbytes: Bytes
    first: Count
    last: Count


class Provision(Struct, frozen=True):
    """One allocation; ``lasting`` is False for memory that is freed after loading."""

    name: str
    nbytes: Bytes
    mode: StorageMode
    lasting: bool = True


class StaticPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-static/1"):
    """The result of ``memfit plan static``."""

    model: str
    model_type: str
    backend: str
    versions: Mapping[str, str]
    context_tokens: Tokens
    capacity_tokens: Tokens
    """The context rounded up to the engine's step."""
    arena_bytes: Bytes
    lower_bound_bytes: Bytes
    provisions: tuple[Provision, ...]
    private_bytes: Bytes
    shared_bytes: Bytes
    loading_bytes: Bytes
    """Weights and the staging buffer they are copied through."""
    calls: tuple[CallArena, ...]
    placements: tuple[Placement, ...]
    """Intermediates of the call with the largest arena."""
    notes: tuple[Note, ...]
