"""Calls of one class at many small sizes, at least so many of each structure."""

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.mlx.call_plan import PlannedCall, planned_calls
from memfit.estimators.programs.dimensions import call_sizes, config_sizes
from memfit.estimators.programs.select import features_met
from memfit.estimators.recording.canonical import canonical
from memfit.estimators.recording.classes import ClassPlan, Draw
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.traced_model import TracedModel

LEAST = 10
"""Models of which a structure is recorded, more where one of their sizes was always the same."""
_MOST = 14
_DRAWS, _FEW_DRAWS = 4000, 1000
# Calls of one kind that are kept to choose from, and those of which the next one is taken.
_POOL, _CHOICE = 40, 12
_STEPS = (64, 128, 256, 384, 512, 640, 1000, 1024, 2048)
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


def _with_kv_bits(workload: Workload, chance: random.Random) -> Workload:
    """Quantise the caches from the first call on, or somewhere in the run."""
    start = chance.choice((0, chance.randrange(workload.total_tokens), workload.prompt_tokens))
    bits, group_size = chance.choice(_KV_BITS), chance.choice(_KV_GROUPS)
    return replace(workload, kv_bits=bits, kv_group_size=group_size, quantized_kv_start=start)


_KV_BITS, _KV_GROUPS = (2, 3, 4, 6, 8), (32, 64)
# Of the runs of one sequence.
_QUANTISED = 0.4
_KINDS = 9
# More are prefilled in groups of eight.
_LARGEST_BATCH = 8


class _Candidate(NamedTuple):
    """A call that could be recorded."""

    draw: Draw
    sizes: Mapping[str, int]
    workload: Workload
    target: TraceTarget
    phase: CallPhase


def draw_calls(
    plan: ClassPlan,
    targets: Sequence[TraceTarget],
    *,
    packed: bool,
    seed: int = 1,
    least: int = LEAST,
) -> dict[Hashable, list[DrawnCall]]:
    """Return recorded calls by `signature`, one with every value of the plan's features.

    Of each signature there are ``least`` if the draws have that many.
    """
    chance = random.Random(seed)
    dims = (*plan.dims, *(("bits", "group_size") if packed else ()))
    pool = _candidates(plan, targets, chance, _DRAWS if least else _FEW_DRAWS, packed=packed)
    drawn: dict[Hashable, list[DrawnCall]] = defaultdict(list)
    sources: dict[Hashable, dict[str, None]] = defaultdict(dict)
    for text, candidates in pool.items():
        for key, call in _recorded(plan, candidates.pop()):
            drawn[key].append(call)
            sources[key][text] = None
    while True:
        rare = [
            (calls, pool[text])
            for key, calls in drawn.items()
            if _is_rare(calls, dims, least)
            for text in sources[key]
            if pool[text]
        ]
        if not rare:
            return drawn
        for key, call in _recorded(plan, _unlike(*chance.choice(rare), (*dims, "L"))):
            drawn[key].append(call)


def _candidates(
    plan: ClassPlan,
    targets: Sequence[TraceTarget],
    chance: random.Random,
    draws: int,
    *,
    packed: bool,
) -> dict[str, list[_Candidate]]:
    """Return calls to record by the value of the plan's features."""
    pool: dict[str, list[_Candidate]] = defaultdict(list)
    features = plan.call_features()
    for count in range(draws):
        target = targets[count % len(targets)]
        batch = chance.randrange(2, _LARGEST_BATCH + 1) if plan.batches and not count % 8 else 1
        workload = _workload(chance.randrange(_KINDS), batch, chance)
        if plan.quantised_caches and batch == 1 and chance.random() < _QUANTISED:
            workload = _with_kv_bits(workload, chance)
        draw = plan.draw(chance, packed=packed)
        sizes = drawn_sizes(plan, draw)
        for planned in planned_calls(workload):
            call = call_sizes(sizes, plan.attention, workload, planned, target)
            candidates = pool[features_met(features, call)]
            if len(candidates) < _POOL:
                candidates.append(_Candidate(draw, call, workload, target, planned.phase))
    return pool


def _unlike(
    calls: Sequence[DrawnCall], candidates: list[_Candidate], dims: Iterable[str]
) -> _Candidate:
    """Take the candidate with the most pairs of sizes that no recorded call has."""
    pairs = list(combinations(dims, 2))
    seen = {(a, each.sizes[a], b, each.sizes[b]) for each in calls for a, b in pairs}

    def new_pairs(candidate: _Candidate) -> int:
        sizes = candidate.sizes
        return sum((a, sizes[a], b, sizes[b]) not in seen for a, b in pairs)

    best = max(candidates[-_CHOICE:], key=new_pairs)
    candidates.remove(best)
    return best


def _recorded(plan: ClassPlan, wanted: _Candidate) -> Iterator[tuple[Hashable, DrawnCall]]:
    draw, sizes, workload, target, phase = wanted
    model = TracedModel(draw.config, target.backend, quantize=draw.quantize)
    trace, _ = model.record(workload, target, phases=frozenset({phase}))
    for call in map(canonical, trace.calls):
        planned = PlannedCall(call.phase, call.tokens, call.position)
        known = call_sizes(sizes, plan.attention, workload, planned, target)
        yield signature(call), DrawnCall(known, call)


def models_of(calls: Sequence[DrawnCall], dims: Iterable[str]) -> int:
    """Return of how many different sizes of the model some calls are."""
    names = tuple(dims)
    return len({tuple(each.sizes[name] for name in names) for each in calls})


def _is_rare(calls: Sequence[DrawnCall], dims: Sequence[str], least: int) -> bool:
    count = models_of(calls, dims)
    if count < least or len(calls) >= _MOST:
        return count < least
    return least > 0 and any(len({each.sizes[name] for each in calls}) == 1 for name in dims)


def drawn_sizes(plan: ClassPlan, draw: Draw) -> dict[str, int]:
    """Return the sizes of a drawn config and its packing."""
    sizes = config_sizes(plan.dims, draw.config)
    if draw.quantize is None:
        return sizes
    return sizes | {"bits": draw.quantize.bits, "group_size": draw.quantize.group_size}
