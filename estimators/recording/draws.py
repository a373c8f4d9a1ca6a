"""Calls of one class at many small sizes, at least so many of each structure."""

import random
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.call_plan import PlannedCall
from memfit.estimators.programs.dimensions import call_sizes, config_sizes
from memfit.estimators.recording.canonical import canonical
from memfit.estimators.recording.classes import ClassPlan, Draw
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.traced_model import TracedModel

LEAST = 20
"""Recordings of a structure: more than there are sizes that may vary in it."""
_ROUNDS = 320
_STEPS = (256, 512, 1024, 2048)
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


def _workload(kind: int, chance: random.Random) -> Workload:
    """Return one of eight kinds of prompts: short, of one chunk, with short last chunks ..."""
    step, chunks = chance.choice(_STEPS), chance.randrange(1, 6)
    prompt = (
        chance.randrange(4, 240),
        chance.randrange(200, step + 1) if step > 256 else 250,
        chunks * step + 1 + chance.randrange(2, 10),
        chunks * step + 1,
        chunks * step + chance.randrange(10, step),
        chunks * step + 1 + chance.choice((256, 512)) % step,
        chance.randrange(2, 12),
        chunks * step + 2,
    )[kind]
    generated = chance.choice(_GENERATED)
    if chance.random() < 0.2:
        # To the end of what a cache has room for.
        generated = (-prompt) % 256 + 256 * chance.randrange(2) or 256
    if chance.random() < 0.1:
        prompt = (prompt // 256 + 1) * 256
    return Workload(prompt_tokens=prompt, max_tokens=generated, prefill_step=step)


_KINDS = 8


def draw_calls(
    plan: ClassPlan, target: TraceTarget, *, packed: bool, seed: int = 1
) -> dict[Hashable, list[DrawnCall]]:
    """Return recorded calls by `signature`, `LEAST` of each if that many were met."""
    chance = random.Random(seed)
    drawn: dict[Hashable, list[DrawnCall]] = defaultdict(list)
    made_by: dict[Hashable, tuple[int, Draw]] = {}
    for count in range(_ROUNDS):
        rare = [key for key, calls in drawn.items() if len(calls) < LEAST]
        if count >= _KINDS * _KINDS and not rare:
            break
        kind, like = chance.randrange(_KINDS), None
        if rare and count % 3:
            kind, like = made_by[chance.choice(rare)]
        workload, draw = _workload(kind, chance), plan.draw(chance, packed=packed, like=like)
        config, quantize = draw
        sizes = config_sizes(plan.dims, config)
        if quantize:
            sizes |= {"bits": quantize.bits, "group_size": quantize.group_size}
        model = TracedModel(config, target.backend, quantize=quantize)
        trace, _ = model.record(workload, target)
        for call in map(canonical, trace.calls):
            planned = PlannedCall(call.phase, call.tokens, call.position)
            key = signature(call)
            made_by.setdefault(key, (kind, draw))
            known = call_sizes(sizes, plan.attention, workload, planned, target)
            drawn[key].append(DrawnCall(known, call))
    return drawn
