"""The operations of one layer in the order MLX runs them, with what each allocates and frees.

An operation either makes a new array or writes into one that no other reads (MLX donates the
buffer of an input with a single consumer: mlx array.h, is_donatable).
"""

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct, field

from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.operation_counts import ELEMENTWISE, OperationCount


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


# A step without what it releases, which only later operations show.
_Unreleased = tuple[int, int, int, tuple[tuple[int, int], ...], int]


class Tape(Struct):
    """Records operations; arrays are numbered, 0 is the layer's input."""

    backend: Backend
    width: int
    """Bytes of one activation element."""
    input_elements: int
    splits_products: bool = False
    """Whether products with packed weights are summed from parts."""
    compiled_copies: bool = False
    """Whether compiled functions write over none of their inputs."""
    nbytes: list[int] = field(default_factory=list)
    """Of each array, by its number."""
    elements: list[int] = field(default_factory=list)
    """Of each array: batches count elements, not bytes."""
    retained: set[int] = field(default_factory=set)
    """Arrays that outlive the layer."""
    deferred: list[Callable[[], None]] = field(default_factory=list)
    largest: int = 0
    largest_name: str = ""
    _steps: list[_Unreleased] = field(default_factory=list)
    _released: list[int] = field(default_factory=list)
    _touched: dict[int, int] = field(default_factory=dict)
    """At which step each array was touched last."""
    _layer_steps: int = -1
    """Steps before the deferred ones, while these are recorded."""
    _awaited: list[int] = field(default_factory=list)
    """Arrays of the layer that deferred steps read."""

    def __post_init__(self) -> None:
        self._touched[self.existing(self.input_elements)] = -1

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
        name: str = "activations",
    ) -> int:
        """Record an operation with an array of its own; ``weight`` elements are also touched."""
        made = self.existing(elements, nbytes)
        if self.nbytes[made] > self.largest:
            self.largest, self.largest_name = self.nbytes[made], name
        self._record((*inputs, made), self.nbytes[made], weight, counts, temporary)
        return made

    def inplace(
        self, target: int, *inputs: int, weight: int = 0, counts: OperationCount = ELEMENTWISE
    ) -> int:
        """Record an operation that writes into ``target``."""
        self._record((target, *inputs), 0, weight, counts, 0)
        return target

    def compiled(self, target: int, *inputs: int) -> int:
        """Record a compiled function, which writes into ``target`` where it writes over inputs."""
        if self.compiled_copies:
            return self.allocate((target, *inputs), self.elements[target])
        return self.inplace(target, *inputs)

    def retain(self, array: int) -> int:
        """Mark an array as outliving the layer: a cache, or the layer's output."""
        self.retained.add(array)
        return array

    def defer(self, record: Callable[[], None]) -> None:
        """Record operations that MLX runs at the end of the call, after all layers.

        Its tape is filled breadth first from what is evaluated (mlx transforms.cpp, eval_impl),
        so that what only a state needs is run last, and what that reads lives until then.
        """
        self.deferred.append(record)

    def _record(
        self,
        arrays: tuple[int, ...],
        allocated: int,
        elements: int,
        counts: OperationCount,
        temporary: int,
    ) -> None:
        dispatches = counts.kernels
        if self.backend == "cpu":
            # One empty task after each operation, views included (mlx backend/cpu/eval.cpp).
            dispatches += 1 + counts.views
        touched, step = self._touched, len(self._steps)
        repeated, longest_ago = [], 0
        for array in arrays:
            before = touched.get(array)
            if before is None:
                elements += self.elements[array]
            elif before < self._layer_steps:
                # From the layer into the deferred steps: all other layers are between.
                elements += self.elements[array]
                self._awaited.append(array)
            elif before < step:
                repeated.append((self.elements[array], step - before))
                if step - before > longest_ago:
                    longest_ago = step - before
            touched[array] = step
        # MLX holds temporaries until the batch has run, like the operation's inputs.
        allocated += temporary
        self._steps.append((allocated, dispatches, elements, tuple(repeated), longest_ago))
        self._released.append(temporary)

    def program(self) -> Program:
        """Return what was recorded, every array freed after its last use unless retained."""
        early = len(self._steps)
        self._layer_steps = early if self.deferred else -1
        for record_deferred in self.deferred:
            record_deferred()
        released = self._released.copy()
        for array, step in self._touched.items():
            # The layer's input has step -1 while no operation of the layer has read it.
            if step >= 0 and array not in self.retained:
                released[step] += self.nbytes[array]
        steps = [
            Step(allocated, freed, dispatches, elements, repeated, longest_ago)
            for (allocated, dispatches, elements, repeated, longest_ago), freed in zip(
                self._steps, released, strict=True
            )
        ]
        deferred_bytes = sum(self.nbytes[a] for a in self._awaited if a not in self.retained)
        run, deferred = tuple(steps[:early]), tuple(steps[early:])
        return Program(run, self.largest, self.largest_name, deferred, deferred_bytes)
