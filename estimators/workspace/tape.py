"""The operations of a layer in MLX's order, and what a run of them keeps alive at once.

An operation either makes a new array or writes into one that no other reads (MLX donates the
buffer of an input with a single consumer: mlx array.h, is_donatable).
"""

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import zip_longest
from typing import NamedTuple

from msgspec import Struct, field

from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.kernels import SplitProducts, allocated
from memfit.estimators.mlx.operation_counts import ELEMENTWISE, OperationCount
from memfit.estimators.mlx.scheduler import (
    CPU_DISPATCHES_PER_TASK,
    MAX_ACTIVE_TASKS,
    BatchLimits,
    BatchQueue,
    QueueState,
    TaskQueue,
    gpu_limits,
)


class Step(NamedTuple):
    """One operation as the scheduler sees it."""

    allocated: int
    """Bytes of its outputs and temporaries."""
    released: int
    """Bytes that are free once the batch of work this step is in has run."""
    dispatches: int
    """Kernels, which count towards the end of a batch; on the CPU also empty tasks."""
    elements: int
    """Of arrays first touched here."""
    repeated: tuple[tuple[int, int], ...]
    """Elements of each array touched before, and how many steps ago."""
    longest_ago: int = 0
    """The most steps of these."""


class Program(Struct, frozen=True):
    """The steps of a layer and the largest single allocation among them."""

    steps: tuple[Step, ...]
    """In the order MLX runs them."""
    largest: int
    """Bytes."""
    largest_name: str
    """What it holds."""
    deferred: tuple[Step, ...]
    """The steps that wait for the end of the call."""
    deferred_bytes: int
    """What those free."""
    absent_bytes: int
    """States that the steps make, and that were not there before."""
    deferred_absent_bytes: int
    """Those that the deferred steps make."""


class _Operation(NamedTuple):
    arrays: tuple[int, ...]
    """What it reads, and the one it writes into."""
    written: int
    allocated: int
    weight: int
    counts: OperationCount
    temporary: int
    sizes: tuple[int, ...]
    """The elements of each array as this operation touches it: a view has fewer."""

    @property
    def read(self) -> int:
        """Elements that CUDA counts, each time (mlx cuda/device.cpp, set_input_array)."""
        # An array of its own is the last.
        return sum(self.sizes[:-1] if self.allocated else self.sizes)

    def dispatches(self, backend: Backend) -> int:
        """Return the kernels; the CPU has an empty task in addition, and one for each view."""
        # Source: mlx backend/cpu/eval.cpp.
        return self.counts.kernels + (1 + self.counts.views if backend == "cpu" else 0)


class Tape(Struct):
    """Records operations; arrays are numbered, 0 is the layer's input."""

    backend: Backend
    width: int
    """Bytes of one activation element."""
    input_elements: int
    splits: SplitProducts = SplitProducts()
    """Which products are summed from parts."""
    compiled_copies: bool = False
    """Whether compiled functions write over none of their inputs."""
    nbytes: list[int] = field(default_factory=list)
    """Of each array, by its number."""
    elements: list[int] = field(default_factory=list)
    """Of each array: batches count elements, not bytes."""
    retained: set[int] = field(default_factory=set)
    """Arrays that outlive the layer."""
    deferred: list[Callable[[], object]] = field(default_factory=list)
    absent: int = 0
    """Bytes of states that no call before this one has made."""
    largest: int = 0
    largest_name: str = ""
    output: int | None = None
    """The array that the next layer reads."""
    _operations: list[_Operation] = field(default_factory=list)
    _early: tuple[int, int] | None = None
    """Operations, and absent bytes, before the deferred ones; None until these are recorded."""

    def __post_init__(self) -> None:
        self.existing(self.input_elements)

    def existing(self, elements: int, nbytes: int | None = None) -> int:
        """Number an array that was there before the layer; it is freed after its last use."""
        self.nbytes.append(elements * self.width if nbytes is None else nbytes)
        self.elements.append(elements)
        return len(self.nbytes) - 1

    def allocate(
        self,
        inputs: tuple[int, ...],
        elements: int,
        *,
        nbytes: int | None = None,
        weight: int = 0,
        counts: OperationCount = ELEMENTWISE,
        temporary: int = 0,
        is_part: bool = False,
        name: str = "activations",
    ) -> int:
        """Record an operation with an array of its own; ``weight`` elements are also touched.

        One that reads ``is_part`` of its first input touches as many elements as it makes.
        """
        requested = elements * self.width if nbytes is None else nbytes
        if requested > self.largest:
            self.largest, self.largest_name = requested, name
        taken = allocated(requested, self.backend)
        made = self.existing(elements, taken)
        arrays = (*inputs, made)
        sizes = [self.elements[array] for array in arrays]
        if is_part:
            sizes[0] = min(sizes[0], elements)
        self._operations.append(
            _Operation(
                arrays,
                made,
                taken,
                weight,
                counts,
                allocated(temporary, self.backend),
                tuple(sizes),
            )
        )
        return made

    def inplace(
        self, target: int, *inputs: int, weight: int = 0, counts: OperationCount = ELEMENTWISE
    ) -> int:
        """Record an operation that writes into ``target``."""
        arrays = (target, *inputs)
        sizes = tuple(self.elements[array] for array in arrays)
        self._operations.append(_Operation(arrays, target, 0, weight, counts, 0, sizes))
        return target

    def compiled(self, target: int, *inputs: int) -> int:
        """Record a compiled function, which writes into ``target`` where it writes over inputs."""
        if self.compiled_copies:
            return self.allocate((target, *inputs), self.elements[target])
        return self.inplace(target, *inputs)

    def alternate(self, chains: Iterable[Callable[[], int]]) -> list[int]:
        """Record chains that MLX, which walks the graph breadth first, runs in turns."""
        made, recorded, start = list[int](), [], len(self._operations)
        for chain in chains:
            made.append(chain())
            recorded.append(self._operations[start:])
            del self._operations[start:]
        for turn in zip_longest(*recorded):
            self._operations += [operation for operation in turn if operation]
        return made

    def old_state(self, elements: int, nbytes: int, *, exists: bool) -> int:
        """Number a state as it was before the call: zeros where there was no call before."""
        if exists:
            return self.existing(elements, nbytes)
        self.absent += nbytes
        return self.allocate((), elements, nbytes=nbytes)

    def retain(self, array: int) -> int:
        """Mark an array as outliving the layer: a cache, or the layer's output."""
        self.retained.add(array)
        return array

    def defer(self, record: Callable[[], object]) -> None:
        """Record operations that MLX runs at the end of the call, after all layers.

        Its tape is filled breadth first from what is evaluated (mlx transforms.cpp, eval_impl),
        so that what only a state needs is run last, and what that reads lives until then.
        """
        self.deferred.append(record)

    def program(self, *, state_only: bool = False) -> Program:
        """Return what was recorded, every array freed after its last use unless it is kept.

        With ``state_only``, nothing that only the layer's output needs. Nothing is recorded after.
        """
        if self._early is None:
            self._early = len(self._operations), self.absent
            for record_deferred in self.deferred:
                record_deferred()
        early, absent = self._early
        run, deferred = self._operations[:early], self._operations[early:]
        kept = self.retained
        if state_only:
            needed = set(kept)
            deferred, run = _needed(deferred, needed), _needed(run, needed)
        elif self.output is not None:
            kept = kept | {self.output}
        steps, awaited = self._steps(run, deferred, kept)
        deferred_bytes = sum(self.nbytes[a] for a in awaited if a not in kept)
        return Program(
            tuple(steps[: len(run)]),
            self.largest,
            self.largest_name,
            tuple(steps[len(run) :]),
            deferred_bytes,
            absent,
            self.absent - absent,
        )

    def _steps(
        self, run: list[_Operation], deferred: list[_Operation], kept: Set[int]
    ) -> tuple[list[Step], list[int]]:
        """Return a step for each operation, and the arrays of the layer that deferred ones read."""
        operations = (*run, *deferred)
        last = {array: step for step, each in enumerate(operations) for array in each.arrays}
        freed: dict[int, int] = {}
        for array, step in last.items():
            if array not in kept:
                freed[step] = freed.get(step, 0) + self.nbytes[array]
        # The layer's input is touched before its first operation.
        touched, awaited = {0: -1}, []
        steps = []
        for step, operation in enumerate(operations):
            elements, repeated, longest_ago = operation.weight, [], 0
            for array, size in zip(operation.arrays, operation.sizes, strict=True):
                before = touched.get(array)
                if before is None:
                    elements += size
                elif before < len(run) <= step:
                    # From the layer into the deferred steps: all other layers are between.
                    elements += size
                    awaited.append(array)
                elif before < step:
                    repeated.append((size, step - before))
                    longest_ago = max(longest_ago, step - before)
                touched[array] = step
            if self.backend == "cuda":
                elements, repeated, longest_ago = operation.weight + operation.read, [], 0
            # MLX holds temporaries until the batch has run, like the operation's inputs.
            temporary = operation.temporary
            steps.append(
                Step(
                    operation.allocated + temporary,
                    temporary + freed.get(step, 0),
                    operation.dispatches(self.backend),
                    elements,
                    tuple(repeated),
                    longest_ago,
                )
            )
        return steps, awaited


def _needed(operations: list[_Operation], needed: set[int]) -> list[_Operation]:
    """Return the operations that write what is ``needed``, to which what they read is added."""
    kept = []
    for each in reversed(operations):
        if each.written in needed:
            needed.update(each.arrays)
            kept.append(each)
    return kept[::-1]


LEAST_SIMULATED = 8
"""Layers followed up to the last of each kind: these or more, as many as can be in flight."""

# Steps from which on the state of a queue is compared.
_LONG_LAYER = 100


def formula_limits(device: Device) -> BatchLimits | None:
    """Return the limits of a GPU's batches, None for the CPU, which has tasks."""
    return None if device.backend == "cpu" else gpu_limits(device)


def transient_peak(layers: Iterable[tuple[Step, ...]], limits: BatchLimits | None) -> int:
    """Return the most bytes alive at once beyond those alive at the start, 0 at least."""
    if limits is None:
        return _peak_of_tasks(layers)
    queue: BatchQueue[int] = BatchQueue(limits)
    # Local names: this loop runs for each operation of each estimate.
    submit, batch = queue.submit, queue.open
    total = most = 0
    # By layer: the state it was last followed from, the peak and what stays, and the state after.
    known: dict[int, tuple[QueueState[int], int, int, QueueState[int]]] = {}
    for steps in layers:
        # A loop over tokens mostly begins and ends in one state; few steps are followed sooner.
        state = queue.state if len(steps) >= _LONG_LAYER else None
        last = known.get(id(steps)) if state else None
        if last and last[0] == state:
            _, peak, alive, after = last
            queue.resume(after)
            most, total = max(most, total + peak), total + alive
            continue
        alive = peak = 0
        for added, released, dispatches, elements, repeated, longest_ago in steps:
            alive += added
            if alive > peak:
                peak = alive
            if longest_ago > len(batch):
                # Touched before, but in a batch that is already closed.
                in_batch = len(batch)
                # A batch counts each buffer once (mlx backend/metal/device.cpp, set_input_array).
                elements += sum([count for count, ago in repeated if ago > in_batch])
            done = submit(released, dispatches, elements)
            if done:
                # After its last use is recorded, a buffer is free only once its batch has run.
                alive -= sum(done)
        if state:
            known[id(steps)] = state, peak, alive, queue.state
        most, total = max(most, total + peak), total + alive
    return most


def _peak_of_tasks(layers: Iterable[tuple[Step, ...]]) -> int:
    queue: TaskQueue[int] = TaskQueue()
    alive = peak = 0
    for step in itertools.chain.from_iterable(layers):
        alive += step.allocated
        peak = max(peak, alive)
        # The queue itself adds the empty task after each operation.
        alive -= sum(queue.submit(step.released, step.dispatches - 1, step.elements))
    return peak


def layers_in_flight(programs: Sequence[Program], limits: BatchLimits | None) -> int:
    """Return how many layers can be in flight together: the cheapest ones, in every batch."""
    dispatches = min(sum(step.dispatches for step in p.steps) for p in programs)
    if limits is None:
        tasks = (MAX_ACTIVE_TASKS + 1) * CPU_DISPATCHES_PER_TASK
        return max(LEAST_SIMULATED, ceil_div(tasks, max(1, dispatches)))
    # Closed batches that have not run, and the open one.
    batches = limits.in_flight + 1
    elements = min(sum(step.elements for step in p.steps) for p in programs)
    # The operation that closes a batch is in it.
    most = (limits.max_mebi_elements + 1 << 20) + max(s.elements for p in programs for s in p.steps)
    by_dispatches = ceil_div(batches * (limits.max_ops + 1), max(1, dispatches))
    by_elements = ceil_div(batches * most, max(1, elements))
    return max(LEAST_SIMULATED, min(by_dispatches, by_elements))


def simulated_layers(order: Sequence[int], window: int) -> list[int]:
    """Return the layers that represent all: ``window`` of them up to the last of each kind."""
    # Everything before the last layer of a kind has its caches as they are after the call.
    last = {number: index for index, number in enumerate(order)}
    ends = {*last.values(), len(order) - 1}
    return sorted({i for end in ends for i in range(max(0, end - window + 1), end + 1)})
