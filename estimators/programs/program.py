"""Lowered calls cut into layers, so that a few recorded layers stand for all of a model.

The steps of a layer are those from the first that computes something of it to the first of the
next one. Buffers are named from where a layer stands: its own, those of the layer before, and those
that all layers can read. So equal layers have equal steps, and a call of any depth is a sequence of
them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

from memfit.estimators.programs.sizes import evaluator, expression
from memfit.estimators.programs.steps import (
    TEMPORARY,
    Action,
    Choice,
    Entry,
    Lowered,
    LoweringError,
    Marked,
    Outcome,
    Question,
    Step,
)

_Kept = TypeVar("_Kept")
# Names of expressions are their positions in `Program.values`.
Number = int
# A buffer of the layer itself, of the layer before, or of all: `_Cut.slot`.
Slot = int


class Cache(NamedTuple):
    """An array of a cache that a layer finds or leaves."""

    slot: Slot | None
    shape: tuple[Number, ...]
    itemsize: int
    waiting: tuple[Slot, ...]
    flags: tuple[Slot, ...]
    """Flags that say how it lies."""


class Block(NamedTuple):
    """One layer, or what comes before all layers; sizes are positions of expressions."""

    steps: tuple[Step, ...]
    caches: tuple[Cache, ...]
    inputs: tuple[tuple[Slot, Number, str], ...]
    weights: tuple[Slot, ...]
    """Those that several steps read."""
    unused: tuple[Slot, ...]
    held: tuple[Cache, ...]
    end: tuple[Slot, ...]
    samples: tuple[Slot, ...]
    shared: tuple[tuple[Slot, Slot], ...]
    """Its buffers that later layers read: their slots there and here."""
    saved: tuple[Slot, ...] = ()
    """Its buffers that steps read which follow on all layers: `_Cut.after`."""
    taken: tuple[Slot, ...] = ()
    """Of such steps the slots of what their layer has saved."""
    ranks: tuple[int, ...] = ()
    """The places of what it holds among all that its layer holds."""


class Program(NamedTuple):
    """A call of any depth as blocks."""

    blocks: tuple[Block, ...]
    order: tuple[int, ...]
    """Positions of the blocks, in the order they run."""
    places: tuple[int, ...]
    """The layer that each of them belongs to, from 1 on: those after all layers come again."""
    local: int
    """Slots of one layer; those of the layer before follow, then those of all."""
    slots: int
    samples: bool
    """Whether its results are a token and its log-probabilities."""
    values: Callable[[Mapping[str, int]], tuple[int, ...]]
    """The values of the expressions from the sizes by name."""
    sample_bytes: tuple[Number, ...]
    first: str
    constants: Mapping[Number, str]
    """Those of the values that are the same at all sizes."""

    def by_layer(self, held: Sequence[_Kept]) -> list[_Kept]:
        """Return what blocks hold, one after another, in the order of their layers."""
        blocks = zip(self.places, (self.blocks[number] for number in self.order), strict=True)
        keys = [(place, rank) for place, block in blocks for rank in block.ranks]
        return [each for _, each in sorted(zip(keys, held, strict=True), key=itemgetter(0))]


class _Cut:
    """The steps of a lowered call by layer."""

    def __init__(
        self,
        lowered: Lowered,
        steps: Sequence[int],
        arrays: Sequence[int],
        after: Sequence[int],
    ) -> None:
        """Take the layer of each step, and of each array; -1 is before all layers.

        Steps may follow on all layers that belong to one before, such as those that count what the
        caches of a batch hold: those of ``after``, whose numbers are behind those of the layers.
        """
        self.lowered = lowered
        self.layers = max((*steps, -1)) + 1 - len(after)
        self.after = {self.layers + 1 + i: layer + 1 for i, layer in enumerate(after)}
        self.steps: list[list[Step]] = [[] for _ in range(self.layers + 1 + len(after))]
        for step, layer in zip(lowered.steps, steps, strict=True):
            self.steps[layer + 1].append(step)
        self._array_layers = arrays
        self.expressions: dict[str, Number] = {"0": 0}
        self.home: dict[int, int] = {}
        self._index: dict[int, int] = {}
        self._count = [0] * len(self.steps)
        self.saved: dict[int, dict[int, Slot]] = {}
        uses = [{each for step in steps for each in set(_buffers(step))} for steps in self.steps]
        # A weight that one step reads is in no batch twice.
        count: dict[int, int] = {}
        for step in lowered.steps:
            for each in lowered.weights.intersection(_buffers(step)):
                count[each] = count.get(each, 0) + 1
        self.folded = {each for each, times in count.items() if times == 1}
        for entry in lowered.caches:
            self._settle(entry, arrays[entry.array] + 1)
        for number, *_ in lowered.inputs:
            self._place(number, next((i for i, used in enumerate(uses) if number in used), 0))
        for layer, used in enumerate(uses):
            for number in sorted(used - self.folded):
                self._place(number, layer)
        for entry in lowered.held:
            self._settle(entry, arrays[entry.array] + 1)
        for block, layer in self.after.items():
            self._save(block, layer, sorted(uses[block] - self.folded))
        self.local = max(self._count)
        self._global: dict[int, Slot] = {}
        self._names_own = False

    def _settle(self, entry: Entry, layer: int) -> None:
        for number in _numbers(entry):
            self._place(number, layer)

    def _place(self, number: int, layer: int) -> None:
        if number not in self.home:
            self.home[number] = layer
            self._index[number] = self._count[layer]
            self._count[layer] += 1

    def _save(self, block: int, layer: int, numbers: Iterable[int]) -> None:
        """Let steps after all layers find what their layer has left."""
        flags = {flag for entry in self.lowered.held for flag in entry.flags}
        kept = [number for number in numbers if self.home[number] == layer]
        if self.lowered.weights.union(flags).intersection(kept):
            raise LoweringError(f"steps after all layers read weights of layer {layer - 1}")
        self.saved[block] = {n: self._count[block] + i for i, n in enumerate(kept)}
        self._count[block] += len(kept)

    def _last(self, number: int) -> int | None:
        """Return the last block that has a part in a buffer."""
        return next(
            (b for b, saved in self.saved.items() if number in saved), self.home.get(number)
        )

    def number(self, size: int) -> Number:
        return self.expressions.setdefault(expression(size), len(self.expressions))

    def slot(self, number: int, layer: int) -> Slot:
        """Return where a layer finds a buffer."""
        if number == TEMPORARY:
            return TEMPORARY
        home = self.home[number]
        if home == layer and layer:
            return self._index[number]
        if number in self.saved.get(layer, ()):
            return self.saved[layer][number]
        if self._names_own:
            return TEMPORARY
        if home == layer - 1 and home and layer not in self.after:
            return self.local + self._index[number]
        return self._global.setdefault(number, 2 * self.local + len(self._global))

    @property
    def slots(self) -> int:
        return 2 * self.local + len(self._global)

    def block(self, layer: int) -> Block:
        lowered = self.lowered
        own_layer = self.after.get(layer, layer)
        of_layer = [e for e in lowered.held if self._layer(self._made_by(e)) == own_layer]

        def slot(number: int) -> Slot:
            return self.slot(number, layer)

        def mine(numbers: Iterable[int]) -> tuple[Slot, ...]:
            return tuple(slot(number) for number in numbers if self._last(number) == layer)

        def entries(found: Iterable[Entry], made_by: Callable[[Entry], int]) -> tuple[Cache, ...]:
            return tuple(
                Cache(
                    None if entry.buffer is None else slot(entry.buffer),
                    tuple(map(self.number, entry.shape)),
                    entry.itemsize,
                    tuple(map(slot, entry.waiting)),
                    tuple(map(slot, entry.flags)),
                )
                for entry in found
                if made_by(entry) == layer
            )

        return Block(
            steps=tuple(
                Step(
                    step.name,
                    0,
                    self._action(step.action, layer),
                    tuple(slot(number) for number in step.dead),
                )
                for step in self.steps[layer]
            ),
            caches=entries(lowered.caches, self._found_by),
            inputs=tuple(
                (slot(number), self.number(size), name)
                for number, size, name in lowered.inputs
                if self.home[number] == layer
            ),
            weights=mine(sorted(lowered.weights)),
            unused=mine(lowered.unused),
            held=entries(lowered.held, self._made_by),
            end=mine(lowered.end),
            samples=mine(lowered.samples),
            shared=(),
            saved=tuple(
                slot(number)
                for block, saved in self.saved.items()
                if self.after[block] == layer
                for number in saved
            ),
            taken=tuple(self.saved.get(layer, {}).values()),
            ranks=tuple(i for i, each in enumerate(of_layer) if self._made_by(each) == layer),
        )

    def own(self, layer: int) -> Block:
        """Return the block with names for its own buffers alone: those the next layer reads."""
        self._names_own = True
        block = self.block(layer)
        self._names_own = False
        return block

    def _made_by(self, entry: Entry) -> int:
        """Return the last block that has a part in what a cache holds."""
        blocks = (self._last(number) or 0 for number in _numbers(entry))
        return max((self._array_layers[entry.array] + 1, *blocks))

    def _found_by(self, entry: Entry) -> int:
        """Return the last layer that has a part in what a cache finds."""
        layers = (self.home[number] for number in _numbers(entry))
        return max((self._array_layers[entry.array] + 1, *layers))

    def _layer(self, block: int) -> int:
        return self.after.get(block, block)

    def with_shared(self, block: Block, layer: int) -> Block:
        """Return the block with what later ones read of it, once all have been made."""
        shared = tuple(
            (slot, self._index[number])
            for number, slot in self._global.items()
            if self.home[number] == layer and layer
        )
        return block._replace(shared=shared)

    def _action(self, action: Action, layer: int) -> Action:
        if isinstance(action, Choice):
            return Choice(
                self._test(action.test, layer),
                self._action(action.then, layer),
                self._action(action.otherwise, layer),
            )
        elements = action.elements
        for number, size in action.touched:
            if number in self.folded:
                elements = elements + size
        touched = (pair for pair in action.touched if pair[0] not in self.folded)
        return Outcome(
            tuple((self.slot(new, layer), self.slot(old, layer)) for new, old in action.shared),
            tuple((self.slot(each, layer), self.number(size)) for each, size in action.allocated),
            self.number(action.kernels),
            self.number(elements),
            tuple((self.slot(each, layer), self.number(size)) for each, size in touched),
            tuple(self.slot(each, layer) for each in action.held),
            tuple((self.slot(flag, layer), value) for flag, value in action.marks),
        )

    def _test(self, test: Question | Marked, layer: int) -> Question | Marked:
        if isinstance(test, Marked):
            return Marked(self.slot(test.flag, layer))
        limit = None if test.limit is None else self.number(test.limit)
        return Question(self.slot(test.buffer, layer), limit, test.waits)


def _numbers(entry: Entry) -> Iterable[int]:
    own = () if entry.buffer is None else (entry.buffer,)
    return (*own, *entry.waiting, *entry.flags)


def _buffers(step: Step) -> Iterable[int]:
    yield from step.dead
    waiting = [step.action]
    while waiting:
        action = waiting.pop()
        if isinstance(action, Choice):
            yield action.test[0]
            waiting += [action.then, action.otherwise]
            continue
        for pair in action.shared:
            yield from pair
        yield from (each for each, _ in action.allocated if each != TEMPORARY)
        yield from (each for each, _ in action.touched)
        yield from action.held
        yield from (flag for flag, _ in action.marks)


def program(
    lowered: Lowered,
    array_layers: Sequence[int],
    step_layers: Sequence[int | None],
    like: Sequence[int],
    functions: Mapping[str, Callable[..., int]],
) -> Program:
    """Return a call of as many layers as ``like`` has, each as the lowered layer it names.

    ``array_layers`` are the layers of the call's arrays, -1 before all layers; ``step_layers``
    those of the lowered steps, None where that is not known.

    Raises:
        LoweringError: when a layer reads what a layer leaves that is not repeated as it is.
    """
    layers, after = _in_order(step_layers)
    cut = _Cut(lowered, layers, array_layers, after)
    parts = [cut.block(block) for block in range(len(cut.steps))]
    parts = [cut.with_shared(part, block) for block, part in enumerate(parts)]
    _require_like(cut, parts[: cut.layers + 1], like)
    block_after = {layer: block for block, layer in cut.after.items()}
    repeated = [place for place, layer in enumerate(like, 1) if layer + 1 in block_after]
    if list(after) == sorted(after, reverse=True):
        repeated.reverse()
    run = [
        *((place, layer + 1) for place, layer in enumerate((-1, *like))),
        *((place, block_after[like[place - 1] + 1]) for place in repeated),
    ]
    known: dict[Block, int] = {}
    order = [known.setdefault(parts[block], len(known)) for _, block in run]
    sample_bytes = tuple(map(cut.number, lowered.sample_bytes))
    return Program(
        tuple(known),
        tuple(order),
        tuple(place for place, _ in run),
        cut.local,
        cut.slots,
        bool(lowered.samples),
        evaluator(cut.expressions, functions),
        sample_bytes,
        lowered.first,
        {number: text for text, number in cut.expressions.items() if text.isdigit()},
    )


def _require_like(cut: _Cut, parts: Sequence[Block], like: Sequence[int]) -> None:
    """Do nothing when each layer finds what the layer it is like has found."""
    for layer, part in enumerate(parts[1:]):
        if part.shared and like.count(layer) > 1:
            raise LoweringError(f"later layers read what layer {layer} leaves")
    for before, layer in dict.fromkeys(pairwise(like)):
        # It has to find the same in the slots of the layer before.
        if before != layer - 1 and cut.own(before + 1) != cut.own(layer):
            raise LoweringError(f"layer {layer} does not follow on one like layer {before}")


def _in_order(layers: Iterable[int | None]) -> tuple[list[int], list[int]]:
    """Return the layer that each step is run with: a step stays with the layer before it.

    Those of layers before the last one that follow on it have numbers behind it; the second list is
    of their layers.

    Raises:
        LoweringError: when such steps are in no order of layers.
    """
    known = list(layers)
    count = max((each for each in known if each is not None), default=-1) + 1
    reached, result, after = -1, list[int](), list[int]()
    for layer in known:
        if reached == count - 1 and layer is not None and 0 <= layer < count - 1:
            if not after or after[-1] != layer:
                after.append(layer)
        elif not after:
            reached = max(reached, -1 if layer is None else layer)
        result.append(count - 1 + len(after) if after else reached)
    if after not in (sorted(set(after)), sorted(set(after), reverse=True)):
        raise LoweringError("steps after all layers are in no order of layers")
    return result, after
