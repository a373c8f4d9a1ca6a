"""Recorded calls followed through MLX's allocator and the device's queue.

The loop is that of mlx_lm/generate.py, generate_step: every chunk of the prompt is evaluated and
the freed buffers given back; the calls after that run into one another.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

from memfit.estimators.base import dtypes
from memfit.estimators.base.workload import CallPhase
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import CHUNKS, PlannedCall, held_samples
from memfit.estimators.mlx.kernels import split_products, vector_attention
from memfit.estimators.mlx.versions import MlxVersions, Version
from memfit.estimators.trace.buffers import rule_of
from memfit.estimators.trace.graph_format import Array, Call
from memfit.estimators.trace.layouts import Allocation, View
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.operation import Operation
from memfit.estimators.trace.schedule import evaluation_order
from memfit.estimators.trace.streams import Stream

# What a call finds in use, in place of the operation that allocated it.
SAMPLES = "log-probabilities"
_BUFFER_NAMES = {"cache": "caches", "computed": SAMPLES}


Part = TypeVar("Part", bound=str)


class CallPeak(Struct, Generic[Part], frozen=True):
    """The most in use during one evaluation; weights are not in it."""

    part: Part
    """The part of the run that it belongs to: the phase of its call, or what the run names."""
    nbytes: int
    operation: str
    """MLX's name of the primitive that reached it."""
    largest_buffer_bytes: int
    batch_bytes: int
    """The most bytes that were free when one batch of its work had run."""
    alive: tuple[tuple[str, int], ...]
    """Bytes in use then, by name; the most first."""
    held_bytes: int
    """The most in use and kept for reuse together, at any of its operations."""
    curve: tuple[int, ...] = ()
    """The most bytes in use during each of its operations."""
    tokens: int = 0
    """Tokens of each sequence."""
    position: int = 0
    """Tokens in the caches when it begins."""


class PlacedCall(NamedTuple):
    """A call that can begin: the order of its nodes, and its arrays."""

    call: Call
    order: list[int]
    views: list[View]
    unmade: dict[int, list[View]]
    """What held arrays that it does not evaluate are made from, by the array's view."""


class CallReplay:
    """Allocator and the device's stream over calls of one model that follow one another."""

    def __init__(self, device: Device, mlx: Version, *, after_others: bool = False) -> None:
        self._memory = Allocator(device.backend)
        self._stream = Stream(device, after_others=after_others)
        self._operation = Operation(
            self._memory,
            splits=split_products(device, MlxVersions(mlx)),
            vector_attention=vector_attention(device, MlxVersions(mlx)),
            compiled_copies=MlxVersions(mlx).has("compiled_copies"),
            ropes_in_place=MlxVersions(mlx).has("cuda_rope_in_place"),
        )
        self._begin()

    def _begin(self) -> None:
        self._held: list[View] = []
        # What held arrays that are not evaluated yet will be made from, by the array's view.
        self._unmade: dict[int, list[View]] = {}
        self._labels: Mapping[int, str] = {}
        self._samples: list[list[View]] = []

    @property
    def clock(self) -> int:
        """Count operations; `buffers` were born and died at theirs."""
        return self._memory.clock

    @property
    def buffers(self) -> Sequence[Allocation]:
        """What the last call found in use or allocated."""
        return self._memory.buffers

    def alongside(self) -> "CallReplay":
        """Return the calls of another model on the same device."""
        other = copy(self)
        other._begin()
        return other

    def follow(
        self,
        call: Call,
        *,
        jumped: bool = False,
        sampled: int = 0,
        labels: Mapping[int, str] | None = None,
    ) -> CallPeak[CallPhase]:
        """Evaluate one call; what it leaves in the caches is there for the next.

        When it has ``jumped``, calls before it were left out, and nothing is under way.
        ``sampled`` calls before it have sampled a token. ``labels`` name the buffers of arrays, in
        place of the operation that made them.
        """
        placed = self.place(call, jumped=jumped, held=held_samples(sampled))
        return self.run(placed, labels=labels)

    def place(self, call: Call, *, jumped: bool = False, held: int = 0) -> PlacedCall:
        """Make what a call begins with, and keep what ``held`` calls before it have sampled."""
        memory = self._memory
        order = evaluation_order(call)
        views = [view_of(array) for array in call.arrays]
        self._hand_over(call, views)
        if jumped:
            self.wait()
        self._hold_samples(call, held)
        first = call.nodes[order[0]].name if order else ""
        memory.begin(first)
        self._place_inputs(call, views)
        count_users(call, order, views)
        unmade = unmade_sources(call, order, views)
        # What neither a node reads nor Python holds is dropped before evaluation begins.
        for view in views:
            if not view.references:
                free(view, memory)
        return PlacedCall(call, order, views, unmade)

    def run(
        self, placed: PlacedCall, *, labels: Mapping[int, str] | None = None
    ) -> CallPeak[CallPhase]:
        """Evaluate a call; what it leaves in the caches is there for the next."""
        memory = self._memory
        self._labels = labels or {}
        self._stream.largest_batch = 0
        call, order, views, unmade = placed
        curve = [self._evaluate(call, position, views) for position in order]
        for sources in self._unmade.values():
            self._release(sources)
        self._unmade = unmade
        self._make(views[i] for i in dict.fromkeys(call.held))
        # The references of mx.eval end with it; the loop overwrites its tokens.
        for position in (*call.evaluated, *call.of_role("tokens")):
            drop_user(views[position], memory)
        # An array can be held in two places, and is one buffer all the same.
        sample = sample_of(call)
        self._held = [views[i] for i in dict.fromkeys(call.held) if i not in sample]
        _name_buffers(self._held, "caches")
        if sample:
            self._samples.append([views[i] for i in sample])
            _name_buffers(self._samples[-1], SAMPLES)
        return call_peak(call.phase, call, memory, tuple(curve), self._stream.largest_batch)

    def _evaluate(self, call: Call, position: int, views: list[View]) -> int:
        node, memory, op = call.nodes[position], self._memory, self._operation
        memory.clock += 1
        memory.operation = op.name = node.name
        op.arguments = node.arguments
        op.inputs = inputs = [views[i] for i in node.inputs]
        op.outputs = outputs = [views[i] for i in node.outputs]
        op.temporaries = []
        op.temporary_elements = 0
        op.kernels = 0
        # The rule sees the references before any input is dropped, as eval_cpu and eval_gpu do.
        rule_of(memory.backend, node.name)(op)
        if self._labels:
            for i, view in zip(node.outputs, outputs, strict=True):
                # A scalar that is stretched to a shape has no such buffer.
                if i in self._labels and view.buffer and view.buffer.nbytes >= view.nbytes:
                    view.buffer.operation = self._labels[i]
        # Outputs exist and no input is dropped yet: the most during this operation.
        most = memory.active
        # First the device takes its references, then MLX detaches the array (transforms.cpp).
        self._stream.after(op, _held_by_device(op), memory)
        unmade = self._unmade
        for view in inputs:
            drop_user(view, memory)
            if unmade:
                self._release(unmade.pop(id(view), ()))
        # A second output that nothing uses, such as a last state, is dropped at once.
        for view in outputs:
            if not view.references:
                free(view, memory)
        return most

    def _make(self, held: Iterable[View]) -> None:
        """Give arrays that are not evaluated yet the buffers that they will be written into."""
        for view in held:
            sources = self._unmade.get(id(view), [])
            for source in sources:
                if source.buffer is not None and becomes(source, view) and source.references == 1:
                    view.copy_layout(source)
                    view.buffer, source.buffer = source.buffer, None
                    break

    def _release(self, views: Iterable[View]) -> None:
        for view in views:
            drop_user(view, self._memory)

    def wait(self) -> None:
        """Wait for the device, and give the freed buffers back."""
        self._stream.drain(self._memory)
        self._memory.clear_cache()

    def caches(self) -> tuple[View, ...] | None:
        """Return what the calls so far have left in the caches, None if more than it is in use."""
        buffers = {id(b): b for view in self._held if (b := view.buffer)}.values()
        is_all = sum(buffer.nbytes for buffer in buffers) == self._memory.active
        return _copied(self._held) if is_all else None

    def resume(self, held: Sequence[View]) -> None:
        """Begin with what calls before have left in the caches; nothing is under way."""
        self._held = list(_copied(held))
        for buffer in {id(b): b for view in self._held if (b := view.buffer)}.values():
            self._memory.take(buffer)

    def _hand_over(self, call: Call, views: list[View]) -> None:
        """Give the call the caches of the one before; what it does not take is gone.

        Caches that no array of this call continues are those before a jump.
        """
        left: defaultdict[tuple[tuple[int, ...], int], deque[View]] = defaultdict(deque)
        for before in self._held:
            if before.buffer is not None:
                left[before.shape, before.itemsize].append(before)
        for view in (views[position] for position in call.of_role("cache")):
            if same := left[view.shape, view.itemsize]:
                before = same.popleft()
                # A cache may be a view of a larger buffer, so its layout goes on with it.
                view.copy_layout(before)
                view.buffer, before.buffer = before.buffer, None
                if id(before) in self._unmade:
                    self._unmade[id(view)] = self._unmade.pop(id(before))
        for before in chain.from_iterable(left.values()):
            free(before, self._memory)

    def _hold_samples(self, call: Call, count: int) -> None:
        """Keep what the last ``count`` calls have sampled, also of calls that were left out."""
        while len(self._samples) > count:
            for view in self._samples.pop(0):
                free(view, self._memory)
        while len(self._samples) < count:
            self._samples.append([self._made_before(call.arrays[i]) for i in call.evaluated])

    def _made_before(self, array: Array) -> View:
        view = view_of(array)
        self._place(view, array)
        return view

    def _place_inputs(self, call: Call, views: list[View]) -> None:
        """Give buffers to the other arrays from before the call: tokens, constants, weights."""
        for view, array in zip(views, call.arrays, strict=True):
            # Caches have their buffers from the call before.
            if array.role != "computed" and view.buffer is None:
                self._place(view, array)

    def _place(self, view: View, array: Array) -> None:
        # Its last user frees a scalar; the model and mlx-lm's loop hold the rest.
        if is_outside(array):
            view.buffer = Allocation(array.nbytes, "weights", 0)
            view.references = 1
        else:
            view.buffer = self._memory.allocate(array.nbytes)
            view.buffer.operation = _BUFFER_NAMES.get(array.role, array.role)
            view.references = int(array.role == "tokens")
        view.buffer.references = 1


def sample_of(call: Call) -> tuple[int, ...]:
    """Return the positions of the token and its log-probabilities; a chunk samples none."""
    # After a token the evaluated arrays are the sample, after a chunk they are the caches.
    return () if call.phase in CHUNKS else call.evaluated


def is_outside(array: Array) -> bool:
    """Whether an array is outside of the allocator: `peak` adds the bytes of all weights."""
    return array.role == "weight" or (array.role == "constant" and bool(array.shape))


def view_of(array: Array) -> View:
    return View(array.shape, dtypes.BITS[array.dtype] // 8)


def _copied(views: Iterable[View]) -> tuple[View, ...]:
    """Return views of buffers of their own, which they share as the others do."""
    buffers: dict[int, Allocation] = {}
    made = []
    for view in views:
        other = view.copied()
        if view.buffer is not None:
            # A buffer of two views stays one.
            key = id(view.buffer)
            other.buffer = buffers[key] = buffers.get(key) or view.buffer.copied()
        made.append(other)
    return tuple(made)


def _name_buffers(views: list[View], name: str) -> None:
    for view in views:
        if view.buffer is not None:
            view.buffer.operation = name


def count_users(call: Call, order: list[int], views: list[View]) -> None:
    for position in order:
        for array in call.nodes[position].inputs:
            views[array].references += 1
    for array in (*call.held, *call.evaluated):
        views[array].references += 1


def _held_by_device(op: Operation) -> list[Allocation]:
    """Return the buffers that live until the device has run the operation, each once."""
    # mlx backend/metal/eval.cpp, eval: inputs and sibling outputs, not the output's own buffer.
    own = op.outputs[0].buffer
    held = {id(b): b for view in op.inputs if (b := view.buffer) is not None and b is not own}
    for view in op.outputs[1:]:
        if view.buffer is not None and view.buffer is not own:
            held[id(view.buffer)] = view.buffer
    for buffer in held.values():
        buffer.references += 1
    return [*held.values(), *op.temporaries]


def unmade_sources(call: Call, order: Iterable[int], views: list[View]) -> dict[int, list[View]]:
    """Return what held arrays that no result needs are made from, each with one user more.

    MLX makes such an array in the next call, e.g. the state that a mask chooses (mlx-lm
    gated_delta.py), and keeps till then what it is made from, from this call or before it.
    """
    evaluated = set(order)
    maker = {out: i for i, node in enumerate(call.nodes) for out in node.outputs}
    result: dict[int, list[View]] = {}
    for held in dict.fromkeys(call.held):
        sources: dict[int, View] = {}
        waiting = [held] if held in maker and maker[held] not in evaluated else []
        while waiting:
            array = waiting.pop()
            made_by = maker.get(array)
            if made_by is None or made_by in evaluated:
                sources[array] = views[array]
            else:
                waiting += call.nodes[made_by].inputs
        if sources:
            result[id(views[held])] = list(sources.values())
            for view in sources.values():
                view.references += 1
    return result


def becomes(source: View, made: View) -> bool:
    """Whether an array is written into the buffer of what it is made from."""
    return source.shape == made.shape and source.itemsize == made.itemsize


def drop_user(view: View, memory: Allocator) -> None:
    view.references -= 1
    if not view.references:
        free(view, memory)


def free(view: View, memory: Allocator) -> None:
    if view.buffer is not None:
        memory.release(view.buffer)
        view.buffer = None


def call_peak(
    part: Part,
    call: Call | PlannedCall,
    memory: Allocator,
    curve: tuple[int, ...] = (),
    batch: int = 0,
) -> CallPeak[Part]:
    """Return the most that was in use since the allocator began a call."""
    at = memory.peak_clock
    alive: Counter[str] = Counter()
    for buffer in memory.buffers:
        # A buffer that dies during the operation of the peak is alive at the peak.
        if buffer.born <= at and (buffer.died is None or buffer.died >= at):
            alive[buffer.operation] += buffer.nbytes
    return CallPeak(
        part=part,
        nbytes=memory.peak,
        operation=memory.peak_operation,
        largest_buffer_bytes=max((buffer.nbytes for buffer in memory.buffers), default=0),
        batch_bytes=batch,
        alive=tuple(alive.most_common()),
        held_bytes=memory.held,
        curve=curve,
        tokens=call.tokens,
        position=call.position,
    )
