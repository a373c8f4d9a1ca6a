"""``memfit plan static``: allocations of an engine that allocates before the first token (Foundry).

Sources: Foundry's memory architecture page, and its executor: there are two RoPE tables of F16,
half a head wide and as long as the capacity.
"""

from collections.abc import Iterator, Mapping

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import round_up
from memfit.estimators.base.workload import MAX_TOKENS
from memfit.estimators.mlx.kv_cache import state_bytes
from memfit.estimators.plans.static.arena import Arena, arena, by_mlx, needs, pool
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.static import (
    CallArena,
    Placement,
    Provision,
    StaticPlan,
    StorageMode,
)
from memfit.estimators.runtimes.foundry import FOUNDRY, SHARED_BY, shared_buffers
from memfit.estimators.trace.graph_format import Call, Trace

_F16_BYTES = 2  # of an element of Foundry's tables and caches


def plan_static(
    trace: Trace, model: Model, *, name: str, context_tokens: int, environment: Mapping[str, str]
) -> StaticPlan:
    """Return the allocations for contexts up to ``context_tokens``.

    ``environment`` has the variables of the engine's process.

    Raises:
        InputError: when the trace is of another model type or has no call, or for a bad context.
        UnsupportedError: when a call has too many intermediates.
    """
    if trace.model_type != model.model_type:
        raise InputError(f"the trace is of {trace.model_type}, the model is {model.model_type}")
    if not 1 <= context_tokens <= MAX_TOKENS:
        raise InputError(f"context {context_tokens}: must be from 1 to {MAX_TOKENS} tokens")
    if not trace.calls:
        raise InputError("the trace has no call")
    capacity = round_up(context_tokens, FOUNDRY.kv_step)
    planned = [(call, needs(call)) for call in trace.calls]
    arenas = [arena(need.intermediates) for _, need in planned]
    largest = max(arenas, key=lambda each: each.nbytes)
    calls = tuple(
        CallArena(
            phase=call.phase,
            tokens=call.tokens,
            position=call.position,
            operations=len(call.nodes),
            buffers=len(need.intermediates),
            arena_bytes=own.nbytes,
            lower_bound_bytes=own.lower_bound_bytes,
            separate_bytes=own.separate_bytes,
            largest_bytes=own.largest_bytes,
            input_bytes=need.input_bytes,
            output_bytes=need.output_bytes,
            constant_bytes=need.constant_bytes,
            pool_bytes=pooled.nbytes,
            pool_wasted_bytes=pooled.wasted_bytes,
            mlx_bytes=by_mlx(need.intermediates, trace.backend),
        )
        for (call, need), own in zip(planned, arenas, strict=True)
        for pooled in (pool(need.intermediates),)
    )
    provisions = tuple(_provisions(trace, model, calls, largest, capacity, environment))
    lasting = [each for each in provisions if each.lasting]
    resident = {
        mode: sum(each.nbytes for each in lasting if each.mode == mode)
        for mode in ("private", "shared")
    }
    staging = sum(each.nbytes for each in provisions if not each.lasting)
    return StaticPlan(
        model=name,
        model_type=model.model_type,
        backend=trace.backend,
        versions=trace.versions,
        context_tokens=context_tokens,
        capacity_tokens=capacity,
        arena_bytes=largest.nbytes,
        lower_bound_bytes=max(each.lower_bound_bytes for each in arenas),
        provisions=provisions,
        private_bytes=resident["private"],
        shared_bytes=resident["shared"],
        loading_bytes=sum(trace.weights.values()) + staging,
        calls=calls,
        placements=tuple(_placements(largest)),
        notes=tuple(_notes(trace.calls, environment)),
    )


def kv_capacity_bytes(model: Model, capacity_tokens: int) -> int:
    """Return the bytes of keys and values in F16, for the capacity in every layer with a cache."""
    return capacity_tokens * sum(
        buffer.elements_per_token * _F16_BYTES for buffer in model.kv_buffers()
    )


def rope_table_bytes(model: Model, capacity_tokens: int) -> int:
    """Return the bytes of the cosine and sine tables, one pair per kind of attention."""
    widths = set()
    for mixer in model.mixers():
        match mixer:
            case Attention():
                widths.add((mixer.kind, mixer.key_dim))
            case LatentAttention():
                widths.add((mixer.kind, mixer.rope_dim))
            case TracedMixer():
                # At most: not all of a key need be rotated.
                widths.update((mixer.kind, buffer.key_dim) for buffer in mixer.kv_buffers())
            case GatedDelta() | Recurrent():
                pass
            case _:
                assert_never(mixer)
    return sum(2 * capacity_tokens * (width // 2) * _F16_BYTES for _, width in widths)


def _provisions(
    trace: Trace,
    model: Model,
    calls: tuple[CallArena, ...],
    largest: Arena,
    capacity: int,
    environment: Mapping[str, str],
) -> Iterator[Provision]:
    shared = shared_buffers(environment)

    def mode(name: str) -> StorageMode:
        return "shared" if name in shared else "private"

    yield Provision("weights", sum(trace.weights.values()), "private")
    yield Provision("kv_cache", kv_capacity_bytes(model, capacity), mode("kv_cache"))
    yield Provision("rope_tables", rope_table_bytes(model, capacity), mode("rope_tables"))
    if states := state_bytes(model, 1):
        yield Provision("states", states, "private")
    yield Provision("intermediates", largest.nbytes, mode("intermediates"))
    yield Provision("constants", max(call.constant_bytes for call in calls), "private")
    yield Provision("inputs", max(call.input_bytes for call in calls), "shared")
    yield Provision("outputs", max(call.output_bytes for call in calls), "shared")
    staging = max(trace.weights.values(), default=0)
    yield Provision("staging", staging, "shared", lasting=False)


def _placements(largest: Arena) -> Iterator[Placement]:
    for offset, nbytes, buffer in largest.placed:
        yield Placement(buffer.operation, offset, nbytes, buffer.first, buffer.last)


def _notes(calls: tuple[Call, ...], environment: Mapping[str, str]) -> Iterator[Note]:
    if all(call.tokens == 1 for call in calls):
        yield Note("warning", "no-chunk", "the trace has no prompt chunk: prefill is missing")
    shared = shared_buffers(environment)
    for name, variable in SHARED_BY.items():
        if name in shared:
            text = f"{variable} is set: Foundry shares with any value, even 0"
            yield Note("info", "shared", text)
    text = (
        "every operation writes to the arena, but views share the buffer of their input and caches"
        " are written in place; the graph does not show temporary buffers inside a kernel"
    )
    yield Note("info", "graph", text)
