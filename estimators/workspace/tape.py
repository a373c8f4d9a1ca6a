"""The operations of one layer in the order MLX runs them, with what each allocates and frees.

An operation either makes a new array or writes into one that nobody else reads (MLX donates the
buffer of an input with a single consumer: mlx array.h, is_donatable).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.estimators.base.records import record
from memfit.estimators.machine.device import Backend


class Step(NamedTuple):
    """One operation as the scheduler sees it.

    ``released`` bytes are free once the batch of work this step is in has run. ``elements`` are
    of arrays first touched here; ``repeated`` pairs the elements of an array touched before
    with how many steps ago.
    """

    allocated: int
    released: int
    dispatches: int
    elements: int
    repeated: tuple[tuple[int, int], ...]


@record(frozen=True, slots=True)
class Program:
    """The steps of a layer and the largest single allocation among them.

    ``deferred`` are the steps that wait for the end of the call; ``deferred_bytes`` are freed then.
    """

    steps: tuple[Step, ...]
    largest: int
    largest_name: str
    deferred: tuple[Step, ...]
    deferred_bytes: int


@dataclass(slots=True)
class _Operation:
    touched: tuple[int, ...]
    made: int | None
    weight: int
    dispatches: int
    temporary: int


@dataclass(slots=True)
class Tape:
    """Records operations; arrays are numbered, 0 is the layer's input.

    ``width`` is the bytes of one activation element.
    """

    backend: Backend
    width: int
    input_elements: int
    nbytes: list[int] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    retained: set[int] = field(default_factory=set)
    operations: list[_Operation] = field(default_factory=list)
    deferred: list[Callable[[], None]] = field(default_factory=list)
    largest: int = 0
    largest_name: str = ""

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
        kernels: int = 1,
        views: int = 0,
        temporary: int = 0,
        name: str = "activations",
    ) -> int:
        """Record an operation with an array of its own; ``weight`` elements are also touched."""
        made = len(self.nbytes)
        self.nbytes.append(elements * self.width if nbytes is None else nbytes)
        self.elements.append(elements)
        if self.nbytes[made] > self.largest:
            self.largest, self.largest_name = self.nbytes[made], name
        self._record((*inputs, made), made, weight, kernels, views, temporary)
        return made

    def inplace(
        self,
        target: int,
        *inputs: int,
        weight: int = 0,
        kernels: int = 1,
        views: int = 0,
    ) -> int:
        """Record an operation that writes into ``target``."""
        self._record((target, *inputs), None, weight, kernels, views, 0)
        return target

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
        touched: tuple[int, ...],
        made: int | None,
        weight: int,
        kernels: int,
        views: int,
        temporary: int,
    ) -> None:
        # The CPU backend dispatches one empty task after each operation, views included.
        dispatches = kernels + 1 + views if self.backend == "cpu" else kernels
        self.operations.append(_Operation(touched, made, weight, dispatches, temporary))

    def program(self) -> Program:
        """Return what was recorded, every array freed after its last use unless kept."""
        early = len(self.operations)
        for record_late in self.deferred:
            record_late()
        last_use = {
            array: index for index, op in enumerate(self.operations) for array in op.touched
        }
        last_touch = {0: -1}
        steps, deferred_bytes = [], 0
        for index, op in enumerate(self.operations):
            released, fresh, repeated = op.temporary, op.weight, []
            for array in dict.fromkeys(op.touched):
                crossed = index >= early > last_touch.get(array, early)
                if array in last_touch and not crossed:
                    repeated.append((self.elements[array], index - last_touch[array]))
                else:
                    fresh += self.elements[array]
                if crossed and array not in self.retained:
                    deferred_bytes += self.nbytes[array]
                last_touch[array] = index
                if last_use[array] == index and array not in self.retained:
                    released += self.nbytes[array]
            made = 0 if op.made is None else self.nbytes[op.made]
            steps.append(Step(made + op.temporary, released, op.dispatches, fresh, tuple(repeated)))
        late = tuple(steps[early:])
        return Program(tuple(steps[:early]), self.largest, self.largest_name, late, deferred_bytes)
