"""Calls of one class at many small sizes, at least so many of each structure."""

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from memfit.estimators.base.workload import ALL_PHASES, CallPhase, Workload
from memfit.estimators.mlx.call_plan import PlannedCall
from memfit.estimators.programs.dimensions import call_sizes, config_sizes
from memfit.estimators.recording.canonical import canonical
from memfit.estimators.recording.classes import ClassPlan, Draw
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.traced_model import TracedModel

LEAST = 8
"""Recordings of a structure, more where one of the config's sizes was the same in all of them."""
_MOST = 20
ROUNDS = 900
_STEPS = (64, 128, 256, 384, 512, 1024, 2048)
_GENERATED = (1, 2, 3, 17, 100, 255, 256, 257, 300, 600)


class DrawnCall(NamedTuple):
    """A recorded call, and the sizes it was recorded at."""

    sizes: Mapping[str, int]
    call: Call


def signature(call: Call) -> Hashable:
    """Return what two calls have in common that differ in sizes alone."""
    return (
        tuple((n.name, n.inputs, n.outputs, tuple(map(_kind, n.arguments))) for n in call.nodes),
        tuple((a.role, a.dtype, len(a.shape), a.name) for a in call.arrays),
        call.evaluated,
        call.held,
    )


def _kind(argument: Any) -> Hashable:
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    # Scales and constants are numbers of the model, not sizes.
    return argument if isinstance(argument, (bool, str)) else type(argument).__name__


def _workload(kind: int, batch: int, chance: random.Random) -> Workload:
    """Return one of nine kinds of prompts: short, of one chunk, with short last chunks ..."""
    step, chunks = chance.choice(_STEPS), chance.randrange(1, 7)
    prompt = (
        chance.randrange(4, 240),
        chance.randrange(step // 2, step + 1),
        chunks * step + 1 + chance.randrange(2, 10),
        chunks * step + 1,
        chunks * step + chance.randrange(10, step),
        chunks * step + 1 + chance.choice((256, 512)) % step,
        chance.randrange(2, 12),
        chunks * step + 2,
        1,
    )[kind]
    generated = chance.choice(_GENERATED)
    if chance.random() < 0.2:
        # To the end of what a cache has room for.
        generated = (-prompt) % 256 + 256 * chance.randrange(2) or 256
    if chance.random() < 0.1:
        prompt = (prompt // 256 + 1) * 256
    return Workload(prompt_tokens=prompt, max_tokens=generated, prefill_step=step, batch=batch)


_KINDS = 9
# More are prefilled in groups of eight.
_LARGEST_BATCH = 8


class _Origin(NamedTuple):
    """What a structure was first met with."""

    kind: int
    is_batch: bool
    draw: Draw
    phase: CallPhase


def draw_calls(
    plan: ClassPlan, target: TraceTarget, *, packed: bool, seed: int = 1, rounds: int = ROUNDS
) -> dict[Hashable, list[DrawnCall]]:
    """Return recorded calls by `signature`, `LEAST` of each if that many were met."""
    chance = random.Random(seed)
    drawn: dict[Hashable, list[DrawnCall]] = defaultdict(list)
    origins: dict[Hashable, _Origin] = {}
    for count in range(rounds):
        rare = [key for key, calls in drawn.items() if _is_rare(calls, plan.dims)]
        if count >= _KINDS * _KINDS and not rare:
            break
        # Mostly more of what is rare, with other sizes, and nothing else of that run.
        like = origins[chance.choice(rare)] if rare and count % 4 else None
        kind = like.kind if like else chance.randrange(_KINDS)
        is_batch = like.is_batch if like else plan.batches and count % 8 == 0
        batch = chance.randrange(2, _LARGEST_BATCH + 1) if is_batch else 1
        workload = _workload(kind, batch, chance)
        draw = plan.draw(chance, packed=packed, like=like.draw if like else None)
        model = TracedModel(draw.config, target.backend, quantize=draw.quantize)
        phases = frozenset({like.phase}) if like else ALL_PHASES
        trace, _ = model.record(workload, target, phases=phases)
        sizes = drawn_sizes(plan, draw)
        for call in map(canonical, trace.calls):
            key = signature(call)
            origins.setdefault(key, _Origin(kind, is_batch, draw, call.phase))
            planned = PlannedCall(call.phase, call.tokens, call.position)
            known = call_sizes(sizes, plan.attention, workload, planned, target)
            drawn[key].append(DrawnCall(known, call))
    return drawn


def _is_rare(calls: Sequence[DrawnCall], dims: Iterable[str]) -> bool:
    if len(calls) < LEAST or len(calls) >= _MOST:
        return len(calls) < LEAST
    return any(len({each.sizes[name] for each in calls}) == 1 for name in dims)


def drawn_sizes(plan: ClassPlan, draw: Draw) -> dict[str, int]:
    """Return the sizes of a drawn config and its packing."""
    sizes = config_sizes(plan.dims, draw.config)
    if draw.quantize is None:
        return sizes
    return sizes | {"bits": draw.quantize.bits, "group_size": draw.quantize.group_size}
