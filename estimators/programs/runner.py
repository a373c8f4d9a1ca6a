"""Calls of a program by its generated code, one after another: the same bytes as by `machine`.

Between two layers all that decides how a call goes on is the open batch, what each batch under way
lets go, the freed buffers that a request of the call can take, and what the layer before has left.
Where that comes back before equal layers, those in between are not run again: they would do the
same, a fixed number of bytes higher.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from memfit.estimators.base.workload import CallPhase
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import PlannedCall
from memfit.estimators.mlx.kernels import allocated
from memfit.estimators.mlx.scheduler import gpu_limits
from memfit.estimators.programs.generated import Buffer, Code, Kept
from memfit.estimators.programs.program import Cache, Program
from memfit.estimators.trace.memory import PAGE
from memfit.estimators.trace.replay import CallPeak

# What a layer finds of an array, with what it is made from and how it lies.
_Loaded = tuple[Buffer, tuple[Buffer, ...], tuple[bool, ...]]
_State = tuple[Any, ...]


class _Useful(dict[int, bool]):
    """Whether a freed buffer of some bytes can be what a request of the call is given."""

    def __init__(self, requests: Iterable[int], limit: Callable[[int], int]) -> None:
        super().__init__()
        self._requests, self._limit = sorted(set(requests)), limit

    def __missing__(self, nbytes: int) -> bool:
        place = bisect_right(self._requests, nbytes)
        is_useful = bool(place) and nbytes < self._limit(self._requests[place - 1])
        self[nbytes] = is_useful
        return is_useful


class _Place(NamedTuple):
    """Where a call is before a layer."""

    layer: int
    active: int
    batch: int
    lengths: tuple[int, ...]
    """Of the lists that layers add to."""


class Queue:
    """The allocator and the batches of a GPU."""

    def __init__(self, device: Device) -> None:
        limits = gpu_limits(device)
        self.ops, self.mebi = limits.max_ops, limits.max_mebi_elements + 1 << 20
        self.in_flight = limits.in_flight
        self.backend, self._page = device.backend, PAGE[device.backend]
        self.active = self.kernels = self.elements = 0
        self.batch = self.done = 0
        """The open batch, and the first one that has not run."""
        self.free: list[int] = []
        self.closed: deque[list[int]] = deque()
        """What each batch under way lets go."""
        self.open: list[int] = []

    def wait(self) -> None:
        """Wait for the device, and give the freed buffers back."""
        self.active -= sum(map(sum, self.closed)) + sum(self.open)
        self.closed.clear()
        self.free, self.open = [], []
        self.batch += 1
        self.done = self.batch
        self.kernels = self.elements = 0

    def limit(self, size: int) -> int:
        """Return the bytes below which a freed buffer is near enough: `Allocator`."""
        return min(2 * size, size + 2 * self._page)

    def allocate(self, nbytes: int) -> int:
        """Return the bytes of a buffer of at least so many."""
        size, free = allocated(nbytes, self.backend), self.free
        place = bisect_left(free, size)
        if place < len(free) and free[place] < self.limit(size):
            size = free.pop(place)
        self.active += size
        return size

    def release(self, size: int, last: int) -> None:
        """Let a buffer go when the ``last`` batch that reads it has run."""
        if last >= self.done:
            self.pending(self.open, self.batch, self.done, last).append(size)
            return
        self.active -= size
        if size:
            insort(self.free, size)

    def pending(self, current: list[int], batch: int, done: int, last: int) -> list[int]:
        """Return what a batch that has not run lets go."""
        return current if last == batch else self.closed[last - done]


class Runner:
    """Calls of one model on a GPU that follow one another."""

    def __init__(self, device: Device) -> None:
        self._queue = Queue(device)
        self._held: list[Kept] = []
        self._samples: list[list[Buffer]] = []

    def wait(self) -> None:
        """Wait for the device, and give the freed buffers back."""
        self._queue.wait()

    def call_peak(
        self,
        code: Code,
        sizes: Mapping[str, int],
        call: PlannedCall,
        *,
        jumped: bool = False,
        samples: int = 0,
    ) -> CallPeak[CallPhase]:
        """Evaluate one call: `Machine.call_peak`, but for the names of what is alive."""
        queue, program = self._queue, code.program
        values = program.values(sizes)
        keys = [_keys(block.caches, values) for block in program.blocks]
        found, lost = self._take_over([key for number in program.order for key in keys[number]])
        if jumped:
            queue.wait()
        self._hold_samples(samples, [values[number] for number in program.sample_bytes])
        largest = max(0, 0, *self._alive(found, lost))
        loads = self._load(program, values, keys, found)
        begun = queue.active
        largest = max([largest, *(size for load in loads for (size, *_), *_ in load)])
        self._drop_unused(program, loads)
        layers = _Layers(queue, code, values, loads)
        layers.run()
        total = queue.active + sum(queue.free)
        for size, last, _ in (*layers.ending, *lost):
            queue.release(size, last)
        self._held = program.by_layer(layers.held) if code.is_swept else layers.held
        if program.samples:
            self._samples.append(layers.sampled)
        return CallPeak(
            part=call.phase,
            nbytes=max(begun, layers.most),
            operation=layers.operation if layers.most > begun else program.first,
            largest_buffer_bytes=max(largest, layers.largest),
            batch_bytes=layers.largest_batch,
            alive=(),
            held_bytes=total,
            curve=(layers.most,),
            tokens=call.tokens,
            position=call.position,
        )

    def _take_over(self, keys: Sequence[tuple[Any, ...]]) -> tuple[list[Kept | None], list[Buffer]]:
        """Return what each cache finds, and what lost ones were to be made from."""
        if [each.key for each in self._held if each.buffer] == keys and len(keys) == len(
            self._held
        ):
            return list(self._held), []
        left: defaultdict[Any, deque[Kept]] = defaultdict(deque)
        for each in self._held:
            if each.buffer is not None:
                left[each.key].append(each)
        found = [left[key].popleft() if left[key] else None for key in keys]
        taken = [each for each in found if each is not None]
        used = {id(x) for each in taken for x in (each.buffer, *each.waiting)}
        lost = [each for each in self._held if each.buffer is None]
        for rest in left.values():
            for each in rest:
                if each.buffer is not None and id(each.buffer) not in used:
                    used.add(id(each.buffer))
                    self._queue.release(*each.buffer[:2])
                lost.append(each)
        # What lost arrays were to be made from goes when the call has been evaluated.
        waiting = {id(x): x for each in lost for x in each.waiting}
        return found, [x for x in waiting.values() if id(x) not in used]

    def _hold_samples(self, count: int, requests: Sequence[int]) -> None:
        """Keep what the last ``count`` calls have sampled, also of calls that were left out."""
        while len(self._samples) > count:
            for size, last, _ in self._samples.pop(0):
                self._queue.release(size, last)
        while len(self._samples) < count:
            self._samples.append([(self._queue.allocate(nbytes), -1, -1) for nbytes in requests])

    def _alive(self, found: Sequence[Kept | None], lost: Sequence[Buffer]) -> Iterator[int]:
        """Yield the bytes of what is in use when a call begins."""
        yield from (
            size for each in found if each for size, *_ in (each.buffer or (0,), *each.waiting)
        )
        yield from (size for size, *_ in (*lost, *chain.from_iterable(self._samples)))
        yield from chain(*self._queue.closed, self._queue.open)

    def _load(
        self,
        program: Program,
        values: Sequence[int],
        keys: Sequence[Sequence[tuple[Any, ...]]],
        found: Sequence[Kept | None],
    ) -> list[list[_Loaded]]:
        """Return what each layer finds: its caches, then other arrays from before the call."""
        loads, left, done, batch = [], iter(found), self._queue.done, self._queue.batch
        for number in program.order:
            load: list[_Loaded] = []
            for (shape, itemsize), kept in zip(keys[number], left, strict=False):
                if kept is None:
                    load.append(((self._queue.allocate(prod(shape) * itemsize), -1, -1), (), ()))
                    continue
                size, last, touched = kept.buffer or (0, -1, -1)
                # All that has run is alike.
                buffer = size, last if last >= done else -1, touched if touched == batch else -1
                load.append((buffer, kept.waiting, kept.flags))
            for _, request, _ in program.blocks[number].inputs:
                load.append(((self._queue.allocate(values[request]), -1, -1), (), ()))
            loads.append(load)
        return loads

    def _drop_unused(self, program: Program, loads: Sequence[Sequence[_Loaded]]) -> None:
        for number, load in zip(program.order, loads, strict=True):
            block = program.blocks[number]
            if block.unused:
                slots = [
                    *(each.slot for each in block.caches),
                    *(slot for slot, *_ in block.inputs),
                ]
                for slot in block.unused:
                    (size, last, _), *_ = load[slots.index(slot)]
                    self._queue.release(size, last)


class _Layers:
    """The layers of one call."""

    def __init__(
        self,
        queue: Queue,
        code: Code,
        values: tuple[int, ...],
        loads: Sequence[Sequence[_Loaded]],
    ) -> None:
        self._queue, self._code, self._loads = queue, code, loads
        self._program = program = code.program
        requests = [allocated(nbytes, queue.backend) for nbytes in values]
        limits = [queue.limit(nbytes) for nbytes in requests]
        self._useful = useful = _Useful((requests[n] for n in code.requests), queue.limit)
        self._free = [n for n in queue.free if useful[n]]
        self.inert = [n for n in queue.free if not useful[n]]
        """Freed buffers that no request of the call can take."""
        self.held: list[Kept] = []
        self.ending: list[Buffer] = []
        self.sampled: list[Buffer] = []
        self._saved: list[tuple[Buffer, ...]] = []
        self.most, self.operation = queue.active, ""
        """The most bytes in use while an operation runs."""
        self.largest = self.largest_batch = 0
        self._slots: tuple[list[Any], ...] = tuple([-1] * program.slots for _ in range(4))
        self._peaks: list[tuple[int, str]] = []
        self._shapes = [_keys(block.held, values) for block in program.blocks]
        self._before = (*self._slots, self._free, self.inert, useful, values, requests, limits)
        self._after = (
            *(self.held, self.ending, self.sampled, self._saved),
            *(self._close, queue.pending),
        )
        local = program.local
        self._carried = [(local + slot, slot) for slot in code.carried]
        self._watched = [*(there for there, _ in self._carried), *range(2 * local, program.slots)]
        # By what is cheap to compare; then by all that decides how a call goes on.
        self._met: set[Any] = set()
        self._known: dict[Any, _Place] = {}

    def run(self) -> None:
        """Run them, but for those that do what others have done."""
        queue, program, layer = self._queue, self._program, 0
        order = program.order
        state: _State = (queue.active, queue.kernels, queue.elements)
        state = (*state, queue.batch, queue.done, queue.open, 0, 0)
        while layer < len(order):
            if layer and self._code.repeats and not program.blocks[order[layer]].taken:
                key = self._key(order[layer], *state)
                place = _Place(layer, state[0], state[3], self._lengths())
                if key is not None and (start := self._known.setdefault(key, place)) is not place:
                    times = self._times(start.layer, layer)
                    if times:
                        state = self._skip(start, place, times, state)
                        layer += times * (layer - start.layer)
                        self._met, self._known = set(), {}
                        continue
            load = self._loads[layer]
            if program.blocks[order[layer]].taken:
                saved = self._saved[self._code.saved_at[program.places[layer]]]
                load = [*load, *((buffer, (), ()) for buffer in saved)]
            state = self._block(order[layer], load, state)
            layer += 1
        queue.active, queue.kernels, queue.elements, queue.batch, queue.done, queue.open = state[:6]
        queue.free = sorted([*self._free, *filter(None, self.inert)])
        self.largest, self.largest_batch = state[6:]

    def _block(self, number: int, loaded: Sequence[_Loaded], state: _State) -> _State:
        queue = self._queue
        lists = (*self._before, self._shapes[number], *self._after, queue.ops, queue.mebi)
        *after, here, at = self._code.blocks[number](lists, *state, loaded)
        block = self._program.blocks[number]
        name = block.steps[at].name if block.steps else ""
        self._peaks.append((here, name))
        if here > self.most:
            self.most, self.operation = here, name
        for pairs in (block.shared, self._carried):
            for there, slot in pairs:
                for each in self._slots:
                    each[there] = each[slot]
        return tuple(after)

    def _lengths(self) -> tuple[int, ...]:
        own = len(self.held), len(self.ending), len(self.inert)
        return *own, len(self._peaks), len(self._saved)

    def _key(self, number: int, *state: Any) -> Any:
        """Return what decides how the call goes on, None where it cannot have been before."""
        _, kernels, elements, batch, done, current, *_ = state
        cheap = (number, kernels, elements, len(self._free), len(current), batch - done)
        if cheap not in self._met:
            self._met.add(cheap)
            return None
        size, last, touched, flag = self._slots
        slots = [
            (size[i], last[i] - batch if last[i] >= done else None, touched[i] == batch, flag[i])
            for i in self._watched
        ]
        lists = (self._free, *self._queue.closed, current)
        return cheap, tuple(slots), tuple(map(tuple, lists))

    def _times(self, start: int, layer: int) -> int:
        """Return how often the layers from ``start`` to this one come again, alike."""
        order, loads, period = self._program.order, self._loads, layer - start
        same = [(order[i], loads[i]) for i in range(start, layer)]
        # What a call before has left in work is nearer to its end in each layer.
        if any(last >= 0 for _, load in same for (_, last, _), *_ in load):
            return 0
        times = 0
        while same == [
            (order[i], loads[i])
            for i in range(layer + times * period, min(layer + (times + 1) * period, len(order)))
        ]:
            times += 1
        return times

    def _skip(self, start: _Place, place: _Place, times: int, state: _State) -> _State:
        """Add what layers leave that come again."""
        grown, batches = place.active - start.active, place.batch - start.batch
        held, ending, inert, peaks, saved = start.lengths
        for here, name in self._peaks[peaks:] if grown > 0 else ():
            if here + times * grown > self.most:
                self.most, self.operation = here + times * grown, name
        more = self.held[held:], self.ending[ending:], self._saved[saved:]
        for time in range(1, times + 1):
            made: dict[int, Buffer] = {}
            for key, buffer, waiting, flags in more[0]:
                later = buffer and made.setdefault(id(buffer), _later(buffer, time * batches))
                self.held.append(Kept(key, later, waiting, flags))
            self.ending.extend(_later(buffer, time * batches) for buffer in more[1])
            for buffers in more[2]:
                self._saved.append(tuple(_later(buffer, time * batches) for buffer in buffers))
        self.inert.extend(self.inert[inert:] * times)
        _, last, touched, _ = self._slots
        for slot in self._watched:
            for each in (last, touched):
                each[slot] += times * batches if each[slot] >= 0 else 0
        active, kernels, elements, batch, done, *others = state
        shift = times * batches
        return active + times * grown, kernels, elements, batch + shift, done + shift, *others

    def _close(
        self, current: list[int], active: int, done: int, most: int
    ) -> tuple[list[int], int, int, int]:
        """Give the device a batch, and wait for the first one if too many are under way."""
        closed = self._queue.closed
        closed.append(current)
        if len(closed) > self._queue.in_flight:
            done += 1
            gone = closed.popleft()
            nbytes = sum(gone)
            active -= nbytes
            most = max(most, nbytes)
            for n in gone:
                if self._useful[n]:
                    insort(self._free, n)
                else:
                    self.inert.append(n)
        return [], active, done, most


def _later(buffer: Buffer, batches: int) -> Buffer:
    size, last, touched = buffer
    return size, last + batches if last >= 0 else -1, touched + batches if touched >= 0 else -1


def _keys(entries: Sequence[Cache], values: Sequence[int]) -> list[tuple[Any, ...]]:
    return [(tuple([values[axis] for axis in each.shape]), each.itemsize) for each in entries]
