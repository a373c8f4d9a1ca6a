"""Programs followed through MLX's allocator and the device's queue, one call after another."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from memfit.estimators.base.workload import CallPhase
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import PlannedCall
from memfit.estimators.programs.program import Block, Cache, Program
from memfit.estimators.programs.steps import Choice, Marked, Outcome, Question, Step
from memfit.estimators.trace.layouts import Allocation
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.replay import SAMPLES, CallPeak, call_peak
from memfit.estimators.trace.streams import Stream


class _Held(NamedTuple):
    """An array of a cache between two calls."""

    shape: tuple[int, ...]
    itemsize: int
    buffer: Allocation | None
    waiting: tuple[Allocation, ...]
    flags: tuple[bool, ...]


class _Left(NamedTuple):
    """What layers leave, one after another."""

    curve: list[int]
    held: list[_Held]
    ending: list[Allocation | None]
    sampled: list[Allocation]


class Machine:
    """The allocator and the device's stream over calls of one model that follow one another."""

    def __init__(self, device: Device) -> None:
        self._memory = Allocator(device.backend)
        self._stream = Stream(device)
        # Of the CPU each operation is a dispatch, also one without a kernel.
        self._counts_all = device.backend == "cpu"
        self._held: list[_Held] = []
        self._samples: list[list[Allocation]] = []
        self._slots: list[Any] = []
        self._values: tuple[int, ...] = ()

    def call_peak(
        self,
        program: Program,
        sizes: Mapping[str, int],
        call: PlannedCall,
        *,
        jumped: bool = False,
        samples: int = 0,
    ) -> CallPeak[CallPhase]:
        """Evaluate one call; what it leaves in the caches is there for the next.

        When it has ``jumped``, calls before it were left out, and nothing is under way. It finds
        what the last ``samples`` calls have sampled.
        """
        memory = self._memory
        self._values = program.values(sizes)
        blocks = [program.blocks[position] for position in program.order]
        found = self._take_over([cache for block in blocks for cache in block.caches])
        if jumped:
            self.wait()
        self._hold_samples(samples, program)
        memory.begin(program.first)
        loads = [self._load(block, found) for block in blocks]
        for block, loaded in zip(blocks, loads, strict=True):
            for slot in block.unused:
                memory.release(dict(loaded)[slot])
        self._stream.largest_batch = 0
        left = self._run(program, blocks, loads)
        for buffer in chain(left.ending, self._lost):
            if buffer is not None:
                memory.release(buffer)
        self._held = left.held
        _name((each.buffer for each in left.held), "caches")
        if program.samples:
            self._samples.append(left.sampled)
            _name(left.sampled, SAMPLES)
        return call_peak(call.phase, call, memory, tuple(left.curve), self._stream.largest_batch)

    def _run(
        self, program: Program, blocks: Sequence[Block], loads: Sequence[Sequence[tuple[int, Any]]]
    ) -> "_Left":
        """Run the layers one after another."""
        left, local = _Left([], [], [], []), program.local
        slots: list[Any] = [None] * program.slots
        self._slots = slots
        saved: dict[int, list[Any]] = {}
        for place, block, loaded in zip(program.places, blocks, loads, strict=True):
            slots[local : 2 * local] = slots[:local]
            slots[:local] = [None] * local
            for slot, buffer in (*loaded, *zip(block.taken, saved.pop(place, ()), strict=False)):
                slots[slot] = buffer
            left.curve.extend(map(self._act, block.steps))
            left.held.extend(map(self._left, block.held))
            left.ending.extend(slots[slot] for slot in block.end)
            left.sampled.extend(slots[slot] for slot in block.samples)
            for there, here in block.shared:
                slots[there] = slots[here]
            if block.saved:
                saved[place] = [slots[slot] for slot in block.saved]
        return left._replace(held=program.by_layer(left.held))

    def wait(self) -> None:
        """Wait for the device, and give the freed buffers back."""
        self._stream.drain(self._memory)
        self._memory.clear_cache()

    def _act(self, step: Step) -> int:
        memory, slots = self._memory, self._slots
        memory.clock += 1
        memory.operation = step.name
        action = step.action
        while isinstance(action, Choice):
            action = action.then if self._is_so(action.test) else action.otherwise
        for flag, value in action.marks:
            slots[flag] = value
        for new, old in action.shared:
            slots[new] = shared = slots[old]
            shared.references += 1
        temporaries = []
        for slot, number in action.allocated:
            made = memory.allocate(self._values[number])
            made.references = 1
            if slot < 0:
                temporaries.append(made)
            else:
                slots[slot] = made
        held = [slots[slot] for slot in action.held]
        for buffer in held:
            buffer.references += 1
        held += temporaries
        most = memory.active
        if action.kernels or held or self._counts_all:
            self._give(action, held)
        for slot in step.dead:
            memory.release(slots[slot])
            slots[slot] = None
        return most

    def _is_so(self, test: Question | Marked) -> bool:
        if isinstance(test, Marked):
            return bool(self._slots[test.flag])
        buffer: Allocation = self._slots[test.buffer]
        is_free = buffer.references == 1 or not test.waits
        return is_free and (test.limit is None or buffer.nbytes <= self._values[test.limit])

    def _give(self, action: Outcome, held: list[Allocation]) -> None:
        """Give the device the kernels of a step."""
        slots, values = self._slots, self._values
        elements = values[action.elements]
        if action.touched:
            touched = self._stream.touched()
            for slot, number in action.touched:
                key = id(slots[slot])
                if key not in touched:
                    touched.add(key)
                    elements += values[number]
        self._stream.submit(held, values[action.kernels], elements, self._memory)

    def _take_over(self, caches: Sequence[Cache]) -> Iterator[_Held | None]:
        """Return for each cache what the call before has left of it; the rest is gone."""
        left: defaultdict[Any, deque[_Held]] = defaultdict(deque)
        for each in self._held:
            if each.buffer is not None:
                left[each.shape, each.itemsize].append(each)
        values = self._values
        result = list[_Held | None]()
        for cache in caches:
            same = left[tuple(values[axis] for axis in cache.shape), cache.itemsize]
            result.append(same.popleft() if same else None)
        taken = [each for each in result if each is not None]
        used = {id(x) for each in taken for x in (each.buffer, *each.waiting)}
        lost = [each for each in self._held if each.buffer is None]
        for each in chain.from_iterable(left.values()):
            if each.buffer is not None and id(each.buffer) not in used:
                used.add(id(each.buffer))
                self._memory.release(each.buffer)
            lost.append(each)
        # What lost arrays were to be made from goes when the call has been evaluated.
        waiting = {id(x): x for each in lost for x in each.waiting}
        self._lost = [x for x in waiting.values() if id(x) not in used]
        return iter(result)

    def _load(self, block: Block, found: Iterator[_Held | None]) -> list[tuple[int, Any]]:
        """Return what is there when a call begins, by slot."""
        memory, values = self._memory, self._values
        loaded: list[tuple[Any, Any]] = []
        for cache in block.caches:
            before = next(found)
            buffer = before.buffer if before else None
            if before is None:
                nbytes = cache.itemsize
                for axis in cache.shape:
                    nbytes *= values[axis]
                buffer = memory.allocate(nbytes)
                buffer.references, buffer.operation = 1, "caches"
            else:
                loaded += zip(cache.waiting, before.waiting, strict=True)
                loaded += zip(cache.flags, before.flags, strict=True)
            loaded.append((cache.slot, buffer))
        for slot, number, name in block.inputs:
            buffer = memory.allocate(values[number])
            buffer.references, buffer.operation = 1, name
            loaded.append((slot, buffer))
        return loaded + [(slot, Allocation(0, "weights", 0)) for slot in block.weights]

    def _left(self, cache: Cache) -> _Held:
        slots, values = self._slots, self._values
        return _Held(
            tuple(values[axis] for axis in cache.shape),
            cache.itemsize,
            None if cache.slot is None else slots[cache.slot],
            tuple(slots[slot] for slot in cache.waiting),
            tuple(slots[slot] for slot in cache.flags),
        )

    def _hold_samples(self, count: int, program: Program) -> None:
        """Keep what the last ``count`` calls have sampled, also of calls that were left out."""
        while len(self._samples) > count:
            for buffer in self._samples.pop(0):
                self._memory.release(buffer)
        while len(self._samples) < count:
            made = [self._memory.allocate(self._values[n]) for n in program.sample_bytes]
            for buffer in made:
                buffer.references, buffer.operation = 1, SAMPLES
            self._samples.append(made)


def _name(buffers: Iterable[Allocation | None], name: str) -> None:
    for buffer in buffers:
        if buffer is not None:
            buffer.operation = name
