"""A plan of static allocation as data: renderers show it and compute nothing.

The fields are those of docs/schema/plan-static.schema.json.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from memfit.estimators.results.estimate import Note

SCHEMA = "memfit.plan-static/1"
StorageMode = Literal["private", "shared"]


class CallArena(Struct, frozen=True):
    """The arena of one call of the graph."""

    phase: str
    tokens: int
    position: int
    operations: int
    buffers: int
    """Number of intermediates."""
    arena_bytes: int
    lower_bound_bytes: int
    separate_bytes: int
    largest_bytes: int
    input_bytes: int
    output_bytes: int
    constant_bytes: int


class Placement(Struct, frozen=True):
    """One intermediate in the arena, alive from operation ``first`` to ``last``."""

    operation: str
    offset: int
    nbytes: int
    first: int
    last: int


class Provision(Struct, frozen=True):
    """One allocation; ``lasting`` is False for memory that is freed after loading."""

    name: str
    nbytes: int
    mode: StorageMode
    lasting: bool = True


class StaticPlan(Struct, frozen=True, kw_only=True):
    """The result of ``memfit plan static``."""

    memfit_version: str
    model: str
    model_type: str
    backend: str
    versions: Mapping[str, str]
    context_tokens: int
    capacity_tokens: int
    """The context rounded up to the engine's step."""
    arena_bytes: int
    lower_bound_bytes: int
    provisions: tuple[Provision, ...]
    private_bytes: int
    shared_bytes: int
    loading_bytes: int
    """Weights and the staging buffer they are copied through."""
    calls: tuple[CallArena, ...]
    placements: tuple[Placement, ...]
    """Intermediates of the call with the largest arena."""
    notes: tuple[Note, ...]
    schema: str = SCHEMA
