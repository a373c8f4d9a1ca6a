"""The calls of a run of a recorded class, followed without MLX.

A call is lowered once for each graph, for what the call before it has left, and for each way the
rules' comparisons come out. After that its steps are followed at any sizes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import Struct

from memfit.estimators.base import dtypes
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import CHUNKS, PlannedCall, held_samples
from memfit.estimators.programs.answers import functions
from memfit.estimators.programs.assembly import Assembled, assembled
from memfit.estimators.programs.dimensions import call_sizes
from memfit.estimators.programs.generated import Code, NoCodeError, code_of
from memfit.estimators.programs.graph import RecordedClass, Structure, Variant
from memfit.estimators.programs.lowering import lower
from memfit.estimators.programs.machine import Machine
from memfit.estimators.programs.program import Program, program
from memfit.estimators.programs.runner import Runner
from memfit.estimators.programs.select import structure_of
from memfit.estimators.programs.sizes import Guards, evaluator, expression
from memfit.estimators.programs.steps import NOTHING, Between, Lowered, LoweringError, before
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.replay import CallPeak
from memfit.estimators.trace.schedule import unmerged

_Values = Callable[[Mapping[str, int]], tuple[Any, ...]]
# A pattern of kinds of layers that is longer than this is followed layer by layer.
_LONGEST_PERIOD = 12


class Depth(NamedTuple):
    """A few layers that stand for all of a model."""

    kinds: tuple[str, ...]
    """Of the few."""
    like: tuple[int, ...]
    """For each layer of the model which of the few it is like."""


def shortened(kinds: tuple[str, ...]) -> Depth:
    """Return the first layers of each kind, those that go on like them, and the last.

    >>> shortened(("0",) * 9)
    Depth(kinds=('0', '0', '0', '0', '0'), like=(0, 1, 2, 2, 2, 2, 2, 3, 4))
    """
    count = len(kinds)
    for period in range(1, _LONGEST_PERIOD + 1):
        start = next(
            (i + 1 for i in reversed(range(count - period)) if kinds[i] != kinds[i + period]), 0
        )
        # The first two layers have graphs of their own, and so have the last two. What all layers
        # of a kind read comes with the first of them; after another start one more is unlike.
        reached = max(start + (3 if start else 2) * period, 2 + period)
        left_out = (count - 2 - reached) // period * period
        if left_out > 0:
            steady = (reached - period + i % period for i in range(left_out))
            like = (*range(reached), *steady, *range(reached, count - left_out))
            return Depth(kinds[:reached] + kinds[reached + left_out :], like)
    return whole(kinds)


def whole(kinds: tuple[str, ...]) -> Depth:
    """Return each layer as it is."""
    return Depth(kinds, tuple(range(len(kinds))))


class _Made(Struct, frozen=True, eq=False, dict=True):
    """A program, and where it holds."""

    holds: _Values
    program: Program
    shapes: _Values
    """Of what it leaves."""
    lowered: Lowered

    @cached_property
    def code(self) -> Code:
        """The program as code for devices with batches."""
        return code_of(self.program)


class _Caches(NamedTuple):
    """The arrays of caches that a graph finds."""

    shapes: _Values
    itemsizes: tuple[int, ...]


class Programs:
    """The programs of one variant of a class on a device, made when they are needed."""

    def __init__(
        self,
        recorded: RecordedClass,
        variant: Variant,
        kinds: tuple[str, ...],
        device: Device,
        target: TraceTarget,
    ) -> None:
        self._recorded, self._variant = recorded, variant
        self._device, self._target = device, target
        self.depth, self._whole = shortened(kinds), whole(kinds)
        """The layers that are lowered: all of them where a few do not stand for the others."""
        self._functions = functions(device, target.versions.mlx)
        self._caches: dict[tuple[int, Depth], _Caches] = {}
        self._made: dict[tuple[int, Depth, Between], list[_Made]] = {}
        self._has_run = False

    def peaks(
        self,
        sizes: Mapping[str, int],
        workload: Workload,
        planned: Sequence[PlannedCall],
        *,
        named: bool = False,
    ) -> list[CallPeak[CallPhase]]:
        """Return the most in use during each call of a run; weights are not in it.

        ``sizes`` are those of the config. What is alive is ``named`` in several times the time.

        Raises:
            UnsupportedError: when a call has a graph that was not recorded.
        """
        # To write code takes as long as a few runs. The order in which the CPU's buffers are freed
        # decides which are kept for reuse, so its references have to be counted.
        if not named and self._has_run and self._device.backend != "cpu":
            with suppress(NoCodeError):
                return self._peaks(Runner(self._device), sizes, workload, planned)
        self._has_run = True
        return self._peaks(Machine(self._device), sizes, workload, planned)

    def _peaks(
        self,
        machine: Machine | Runner,
        sizes: Mapping[str, int],
        workload: Workload,
        planned: Sequence[PlannedCall],
    ) -> list[CallPeak[CallPhase]]:
        try:
            return list(self._followed(machine, self.depth, sizes, workload, planned))
        except LoweringError:
            if self.depth is self._whole:
                raise
            self.depth = self._whole
            return self._peaks(type(machine)(self._device), sizes, workload, planned)

    def _followed(
        self,
        machine: Machine | Runner,
        depth: Depth,
        sizes: Mapping[str, int],
        workload: Workload,
        planned: Sequence[PlannedCall],
    ) -> Iterator[CallPeak[CallPhase]]:
        last: tuple[_Made, tuple[int, ...]] | None = None
        reached, known = -1, dict[str, int]()
        first_token = next(
            (call.position for call in planned if call.phase not in CHUNKS), planned[-1].position
        )
        for call in planned:
            own = call_sizes(sizes, self._recorded.attention, workload, call, self._target)
            structure = structure_of(self._recorded, self._variant, own)
            here = own | before(known)
            made = self._program(structure, depth, here, call, last)
            jumped = call.position != reached
            samples = held_samples(max(0, call.position - first_token))
            if isinstance(machine, Runner):
                yield machine.call_peak(made.code, here, call, jumped=jumped, samples=samples)
            else:
                yield machine.call_peak(made.program, here, call, jumped=jumped, samples=samples)
            if call.phase in CHUNKS:
                machine.wait()
            reached, known = call.position + call.tokens, own
            last = made, made.shapes(here)

    def _program(
        self,
        structure: Structure,
        depth: Depth,
        sizes: Mapping[str, int],
        call: PlannedCall,
        last: tuple[_Made, tuple[int, ...]] | None,
    ) -> _Made:
        found = NOTHING
        if last is not None:
            caches = self._caches_of(structure, depth, sizes, call)
            wanted = zip(caches.shapes(sizes), caches.itemsizes, strict=True)
            lowered = last[0].lowered
            items = (entry.itemsize for entry in lowered.held)
            found = lowered.leaves.handed_over(zip(last[1], items, strict=True), wanted)
        known = self._made.setdefault((id(structure), depth, found), [])
        for made in known:
            if all(made.holds(sizes)):
                return made
        guards = Guards(sizes)
        graph = self._assembled(structure, depth, guards.sizes, call)
        made = self._lowered(graph, depth, guards, found)
        known.append(made)
        return made

    def _assembled(
        self, structure: Structure, depth: Depth, sizes: Mapping[str, int], call: PlannedCall
    ) -> Assembled:
        return assembled(self._recorded, structure, depth.kinds, sizes, call)

    def _caches_of(
        self, structure: Structure, depth: Depth, sizes: Mapping[str, int], call: PlannedCall
    ) -> _Caches:
        key = id(structure), depth
        if key not in self._caches:
            graph = self._assembled(structure, depth, Guards(sizes).sizes, call).call
            arrays = [graph.arrays[i] for i in graph.of_role("cache")]
            self._caches[key] = _Caches(
                self._shapes([array.shape for array in arrays]),
                tuple(dtypes.BITS[array.dtype] // 8 for array in arrays),
            )
        return self._caches[key]

    def _shapes(self, shapes: Sequence[tuple[int, ...]]) -> _Values:
        texts = (f"({''.join(f'{expression(axis)},' for axis in shape)})" for shape in shapes)
        return evaluator(texts, self._functions)

    def _lowered(self, graph: Assembled, depth: Depth, guards: Guards, found: Between) -> _Made:
        mlx = self._target.versions.mlx
        lowered = lower(graph.call, self._device, mlx, found, guards.sizes)
        layers = dict(enumerate(graph.array_layers))
        nodes = unmerged(graph.call).nodes
        steps = [layers.get(nodes[step.node].outputs[0]) for step in lowered.steps]
        return _Made(
            evaluator([f"({guards.condition()})"], self._functions),
            program(lowered, graph.array_layers, steps, depth.like, self._functions),
            self._shapes([entry.shape for entry in lowered.held]),
            lowered,
        )
