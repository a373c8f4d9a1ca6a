"""A recorded call as steps: what each kernel allocates, writes over, reads and lets go.

The rules of the trace run once over a call. Fixed is then what the graph alone decides: MLX's
order, which views share a buffer, where each buffer dies, which kernels run. What the sizes or the
device's progress decide stays open: a step has a tree of choices, of which each asks whether an
input's buffer may be written over. With `Size` in place of numbers, bytes and kernels are
expressions, and the comparisons that the rules made are guards.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import CHUNKS
from memfit.estimators.mlx.kernels import split_products, vector_attention
from memfit.estimators.mlx.versions import MlxVersions, Version
from memfit.estimators.programs.expressions import evaluate
from memfit.estimators.programs.sizes import Size, expression
from memfit.estimators.trace.buffers import rule_of
from memfit.estimators.trace.graph_format import Array, Call
from memfit.estimators.trace.layouts import Allocation, Strides, View, row_strides
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.operation import DONATION_SLACK, Operation
from memfit.estimators.trace.replay import sample_of, unmade_sources, view_of
from memfit.estimators.trace.schedule import evaluation_order, unmerged

_NAME = re.compile(r"[A-Za-z_]\w*")
_LOST = -1
# A buffer that a kernel has for itself.
TEMPORARY = -1


class LoweringError(UnsupportedError):
    """A call has something that its steps cannot tell."""


class Outcome(NamedTuple):
    """What a step does to buffers, which have numbers."""

    moved: tuple[tuple[int, int], ...]
    """Buffers under another number, the new one first: an output in an input's buffer."""
    allocated: tuple[tuple[int, int], ...]
    """Buffers and their bytes."""
    kernels: int
    elements: int
    """Elements that count however often the batch has touched their buffers."""
    touched: tuple[tuple[int, int], ...]
    """Buffers that count once a batch, and their elements."""
    held: tuple[int, ...]
    """Buffers that live until the device has run the step."""


class Question(NamedTuple):
    """Whether a buffer may be written over, or shared."""

    buffer: int
    limit: int | None
    """The most bytes it may have, None: any."""
    waits: bool
    """Whether the device must have run everything that reads it."""


class Answered(NamedTuple):
    """How a question of an earlier step was answered."""

    flag: int
    """The number under which the answer is kept, as a buffer's."""


class Choice(NamedTuple):
    """What a step does depends on a question; ``flag`` keeps its answer for later steps."""

    test: Question | Answered
    then: "Outcome | Choice"
    otherwise: "Outcome | Choice"
    flag: int | None = None


Action: TypeAlias = Outcome | Choice


class Step(NamedTuple):
    """One operation, or several that only look at what is there."""

    name: str
    node: int
    """Its position in the call's nodes."""
    action: Action
    dead: tuple[int, ...]
    """Buffers that nothing in the graph refers to after it."""


class Layout(NamedTuple):
    """How an array lies in its buffer: `View`."""

    strides: Strides | None
    data_size: int
    row: bool
    column: bool
    dense: bool

    @classmethod
    def of(cls, view: View) -> "Layout":
        return cls(view._strides, view.data_size, view.row, view.column, view.dense)

    def put(self, view: View) -> None:
        view.set_layout(
            self.strides, self.data_size, row=self.row, column=self.column, dense=self.dense
        )


class LaidOut(NamedTuple):
    """A `Layout` of which the sizes are expressions of the call that left it."""

    strides: tuple[str, ...]
    data_size: str
    row: bool
    column: bool
    dense: bool

    def layout(self, sizes: Mapping[str, int]) -> Layout:
        """Return it with sizes, those of the call before under the names of `before`."""
        strides = tuple(evaluate(_before(text), sizes) for text in self.strides)
        return Layout(
            strides, evaluate(_before(self.data_size), sizes), self.row, self.column, self.dense
        )


class Kept(NamedTuple):
    """What of an array remains between two calls."""

    laid_out: Any
    """A `LaidOut`, None in rows as a new array, or a `_Fork` of both by flags of the entry."""
    buffer: int | None
    """None: it is made by the next call."""
    waiting: tuple[int, ...] = ()
    """Positions in `Between.sources` of what it will be made from."""


class Between(NamedTuple):
    """What passes from one call to the next, but for the bytes of its buffers."""

    kept: tuple[Kept | None, ...]
    """Of each array that is held, or of each cache of a call; None: a new one."""
    sources: tuple[tuple[int, int], ...] = ()
    """Buffers of arrays that held ones are made from, and for how many of them."""


NOTHING = Between(())


class Entry(NamedTuple):
    """An array with a buffer that the call finds, or that it leaves."""

    array: int
    buffer: int | None
    shape: tuple[int, ...]
    itemsize: int
    waiting: tuple[int, ...] = ()
    """Buffers of what it will be made from."""
    flags: tuple[int, ...] = ()
    """Answers that decide how it lies."""


class Lowered(NamedTuple):
    """A call as steps, for any sizes for which the guards hold."""

    steps: tuple[Step, ...]
    buffers: int
    """How many numbers there are."""
    weights: frozenset[int]
    caches: tuple[Entry, ...]
    inputs: tuple[tuple[int, int, str], ...]
    """Other buffers that are there when it begins, their bytes, and what they are."""
    unused: tuple[int, ...]
    """Those that nothing reads."""
    end: tuple[int, ...]
    """Buffers that die when it has been evaluated."""
    held: tuple[Entry, ...]
    """What Python refers to when it returns, without what was sampled."""
    leaves: Between
    """Of ``held``, in its order."""
    samples: tuple[int, ...]
    sample_bytes: tuple[int, ...]
    first: str
    """The name of its first operation."""


class _Buffer(Allocation):
    __slots__ = ("is_weight", "number")

    def __init__(self, number: int, nbytes: int, *, is_weight: bool = False) -> None:
        super().__init__(nbytes, "", 0)
        self.number, self.is_weight = number, is_weight


class _Tape(Allocator):
    """Notes what is allocated."""

    def __init__(self) -> None:
        super().__init__("metal")
        self.made: list[_Buffer] = []

    def allocate(self, nbytes: int) -> Allocation:
        self.made.append(_Buffer(TEMPORARY, nbytes))
        return self.made[-1]


class _Splits(NamedTuple):
    """`SplitProducts` of which the parts stay a function of sizes; 0 where there is one part."""

    rules: Any

    def packed(self, *sizes: int) -> int:
        return self._parts("packed", *sizes)

    def plain(self, *sizes: int) -> int:
        return self._parts("plain", *sizes)

    def _parts(self, name: str, *sizes: int) -> int:
        parts = getattr(self.rules, name)(*map(int, sizes))
        parts = parts if parts > 1 else 0
        known = next((size for size in sizes if isinstance(size, Size)), None)
        return parts if known is None else known.called(f"{name}_parts", parts, *sizes)

    def functions(self) -> dict[str, Any]:
        """Return what the expressions of its parts call."""
        return {f"{name}_parts": getattr(self, name) for name in ("packed", "plain")}


class _Lowering(Operation):
    """An operation whose open questions are answered by a script."""

    __slots__ = ("asked", "script")

    def __init__(self, device: Device, mlx: Version) -> None:
        versions = MlxVersions(mlx)
        splits: Any = _Splits(split_products(device, versions))
        super().__init__(
            _Tape(),
            splits=splits,
            vector_attention=vector_attention(device, versions),
            compiled_copies=versions.has("compiled_copies"),
            ropes_in_place=versions.has("cuda_rope_in_place"),
        )
        self.script: Sequence[bool] = ()
        self.asked: list[tuple[Question, bool]] = []

    def add_parts(self, parts: int, itemsize: int) -> None:
        self.temporary(parts * self.outputs[0].size, itemsize)
        if isinstance(parts, Size):
            self.kernels += parts.called("bool", bool(int(parts)), parts)
        else:
            self.kernels += bool(parts)

    def is_donatable(self, source: View, out: View | None = None) -> bool:
        buffer: Any = source.buffer
        if source.references != 1 or buffer is None or buffer.references != 1 or buffer.is_weight:
            return False
        if out is not None and source.itemsize != out.itemsize:
            return False
        # What this very operation has just allocated.
        if buffer.number == TEMPORARY:
            return False
        limit = None if out is None else out.nbytes + DONATION_SLACK
        return self._answer(Question(buffer.number, limit, waits=True))

    def is_near(self, source: View, out: View) -> bool:
        buffer: Any = source.buffer
        if buffer.is_weight:
            return bool(buffer.nbytes <= out.nbytes + DONATION_SLACK)
        if source.references != 1 or buffer.references != 1:
            raise LoweringError("an array that others read is made contiguous")
        return self._answer(Question(buffer.number, out.nbytes + DONATION_SLACK, waits=False))

    def _answer(self, question: "Question") -> bool:
        for known, answer in self.asked:
            if known.buffer == question.buffer and known.waits == question.waits:
                if _same(known.limit, question.limit):
                    return answer
        at = len(self.asked)
        answer = self.script[at] if at < len(self.script) else True
        self.asked.append((question, answer))
        return answer


def _same(first: int | None, second: int | None) -> bool:
    if first is None or second is None:
        return first is second
    return expression(first) == expression(second)


# Tests with their answers, in the order they are made.
_Path: TypeAlias = tuple[tuple[Question | Answered, bool], ...]


class _Fork(NamedTuple):
    """A tree of what can follow from tests."""

    test: Question | Answered
    then: Any
    otherwise: Any


class _Result(NamedTuple):
    """What a rule did, for one way to answer its questions."""

    path: _Path
    outputs: tuple[tuple[Any, Layout], ...]
    read: tuple[int, ...]
    """Elements of the inputs."""
    made: tuple[_Buffer, ...]
    temporary_elements: int
    kernels: int


def functions(device: Device, mlx: Version) -> dict[str, Any]:
    """Return what expressions of a lowered call may use."""
    splits = _Splits(split_products(device, MlxVersions(mlx)))
    return splits.functions() | {"bit_length": int.bit_length, "bool": bool}


def before(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a call under the names they have for the next one."""
    return {_before(name): size for name, size in sizes.items()}


def _before(text: str) -> str:
    return _NAME.sub(r"\g<0>_before", text)


def lower(
    call: Call,
    device: Device,
    mlx: Version,
    found: Between = NOTHING,
    sizes: Mapping[str, int] = {},  # noqa: B006 - only read
) -> Lowered:
    """Return the steps of a call that finds what the call before it has left.

    Raises:
        LoweringError: when steps cannot tell what the call does.
    """
    return _Pass(unmerged(call), device, mlx).lowered(found, sizes)


class _Pass:
    """One walk over a call."""

    def __init__(self, call: Call, device: Device, mlx: Version) -> None:
        self.call, self.device = call, device
        self.operation = _Lowering(device, mlx)
        self.views = [view_of(array) for array in call.arrays]
        self.buffers: list[_Buffer] = []
        self.dead: list[int] = []
        self.inputs: list[tuple[int, int, str]] = []
        self.layouts: dict[int, _Fork] = {}
        """Of views that lie differently by how earlier questions were answered."""
        self.flags: dict[tuple[int, Question], int] = {}
        self.waiting: dict[int, list[View]] = {}
        """What the arrays are made from that this call makes of the one before it, by view."""

    def lowered(self, found: Between, sizes: Mapping[str, int]) -> Lowered:
        call, views = self.call, self.views
        order = evaluation_order(call)
        caches = self._take_over(found, sizes)
        self._place_inputs()
        self._count_users(order)
        unmade = unmade_sources(call, order, views)
        for view in views:
            if not view.references:
                self._drop(view)
        unused = self._died()
        steps = [step for position in order for step in self._step(position)]
        for sources in self.waiting.values():
            self._release(sources)
        self.waiting = unmade
        held = list(dict.fromkeys(call.held))
        self._make(held)
        for position in (*call.evaluated, *call.of_role("tokens")):
            self._user_gone(views[position])
        sample = sample_of(call)
        held = [position for position in held if position not in sample]
        # What is held itself goes on as a cache, or is gone.
        caches_left = {id(views[position]) for position in held}
        self.waiting = {
            key: [x for x in sources if x.buffer is not None and id(x) not in caches_left]
            for key, sources in self.waiting.items()
        }
        entries = tuple(map(self._entry, held))
        return Lowered(
            steps=tuple(steps),
            buffers=len(self.buffers),
            weights=frozenset(each.number for each in self.buffers if each.is_weight),
            caches=caches,
            inputs=tuple(self.inputs),
            unused=unused,
            end=self._died(),
            held=entries,
            leaves=self._leaves(entries),
            samples=tuple(
                entry.buffer for i in sample if (entry := self._entry(i)).buffer is not None
            ),
            sample_bytes=tuple(call.arrays[i].nbytes for i in call.evaluated),
            first=call.nodes[order[0]].name if order else "",
        )

    def _new(self, nbytes: int, *, is_weight: bool = False) -> _Buffer:
        buffer = _Buffer(len(self.buffers), nbytes, is_weight=is_weight)
        self.buffers.append(buffer)
        return buffer

    def _entry(self, position: int) -> Entry:
        view, buffer = self.views[position], self.views[position].buffer
        number = buffer.number if isinstance(buffer, _Buffer) else None
        waiting = (source.buffer for source in self.waiting.get(id(view), ()))
        numbers = tuple(each.number for each in waiting if isinstance(each, _Buffer))
        flags = tuple(_flags(self.layouts.get(id(view))))
        return Entry(position, number, view.shape, view.itemsize, numbers, flags)

    def _take_over(self, found: Between, sizes: Mapping[str, int]) -> tuple[Entry, ...]:
        """Give the caches the buffers and layouts that the call before has left."""
        caches = self.call.of_role("cache")
        by_number: dict[int, _Buffer] = {}
        sources: list[View] = []

        def buffer_of(number: int, nbytes: int) -> _Buffer:
            if number not in by_number:
                by_number[number] = self._new(nbytes)
            return by_number[number]

        for position, kept in zip(caches, found.kept or [None] * len(caches), strict=True):
            view = self.views[position]
            if kept is None or kept.buffer is None:
                view.buffer = self._new(view.nbytes)
            else:
                self._lay(view, kept.laid_out, sizes)
                view.buffer = buffer_of(kept.buffer, view.nbytes)
            view.buffer.references += 1
        taken = Counter(i for kept in found.kept if kept for i in kept.waiting)
        for index, (number, users) in enumerate(found.sources):
            view = View((), 1)
            sources.append(view)
            if index in taken:
                view.references = users
                view.buffer = buffer_of(number, 0)
                view.buffer.references += 1
                # Of caches that are lost it goes when the call has been evaluated.
                self.waiting.setdefault(_LOST, []).extend([view] * (users - taken[index]))
        for position, kept in zip(caches, found.kept, strict=False):
            if kept is not None and kept.buffer is not None and kept.waiting:
                self.waiting[id(self.views[position])] = [sources[i] for i in kept.waiting]
        return tuple(map(self._entry, caches))

    def _lay(self, view: View, laid_out: Any, sizes: Mapping[str, int]) -> None:
        """Lay a cache as the call before has left it."""
        if laid_out is None:
            return
        numbers = {flag: self._new(0).number for flag in _flags(laid_out)}
        fresh = Layout.of(view)
        tree = _mapped(
            laid_out,
            numbers.__getitem__,
            lambda each: fresh if each is None else each.layout(sizes),
        )
        _, layout = next(_leaves(tree))
        layout.put(view)
        if numbers:
            self.layouts[id(view)] = tree

    def _laid_out(self, view: View) -> Any:
        tree = self.layouts.get(id(view), Layout.of(view))
        positions = {flag: index for index, flag in enumerate(_flags(tree))}
        return _mapped(tree, positions.__getitem__, partial(_laid_out, view))

    def _place_inputs(self) -> None:
        for view, array in zip(self.views, self.call.arrays, strict=True):
            if array.role == "computed" or view.buffer is not None:
                continue
            if _is_weight(array):
                view.buffer = self._new(array.nbytes, is_weight=True)
                view.references = 1
            else:
                view.buffer = buffer = self._new(array.nbytes)
                self.inputs.append((buffer.number, array.nbytes, array.role))
                view.references = int(array.role == "tokens")
            view.buffer.references = 1

    def _count_users(self, order: Iterable[int]) -> None:
        for position in order:
            for array in self.call.nodes[position].inputs:
                self.views[array].references += 1
        for array in (*self.call.held, *self.call.evaluated):
            self.views[array].references += 1

    def _died(self) -> tuple[int, ...]:
        dead = tuple(self.dead)
        self.dead.clear()
        return dead

    def _drop(self, view: View) -> None:
        buffer = view.buffer
        if buffer is None:
            return
        buffer.references -= 1
        view.buffer = None
        assert isinstance(buffer, _Buffer)
        if not buffer.references and not buffer.is_weight:
            self.dead.append(buffer.number)

    def _user_gone(self, view: View) -> None:
        view.references -= 1
        if not view.references:
            self._drop(view)

    def _release(self, views: Iterable[View]) -> None:
        for view in views:
            self._user_gone(view)

    def _step(self, position: int) -> Iterator[Step]:
        node = self.call.nodes[position]
        inputs = [self.views[i] for i in node.inputs]
        outputs = [self.views[i] for i in node.outputs]
        op = self.operation
        op.name, op.arguments = node.name, node.arguments
        op.inputs, op.outputs = inputs, outputs
        rule = rule_of(self.device.backend, node.name)
        results = [each for path in self._lie(inputs) for each in _results(op, rule, path)]
        owners = self._owners(results, inputs)
        outcomes = [(result.path, self._outcome(result, owners, inputs)) for result in results]
        self._lie_so(results, outputs, position)
        for view, owner in zip(outputs, owners, strict=True):
            view.buffer = owner
            if owner is not None:
                owner.references += 1
        for view in inputs:
            self._user_gone(view)
            if self.waiting:
                self._release(self.waiting.pop(id(view), ()))
        for view in outputs:
            if not view.references:
                self._drop(view)
        dead = self._died()
        action = self._action(_tree(outcomes), position)
        is_empty = not any(_does_something(outcome) for _, outcome in outcomes)
        if dead or self.device.backend == "cpu" or not is_empty:
            yield Step(node.name, position, action, dead)

    def _lie(self, inputs: Sequence[View]) -> Iterator[_Path]:
        """Give the inputs each combination of the layouts they may have, one after another."""
        known = {id(view): (view, self.layouts[id(view)]) for view in inputs if id(view) in self.layouts}
        for choice in product(*(list(_leaves(tree)) for _, tree in known.values())):
            path: dict[Question | Answered, bool] = {}
            if all(path.setdefault(test, answer) == answer for more, _ in choice for test, answer in more):
                for (view, _), (_, layout) in zip(known.values(), choice, strict=True):
                    layout.put(view)
                yield tuple(path.items())

    def _lie_so(self, results: Sequence[_Result], outputs: Sequence[View], position: int) -> None:
        """Give the outputs their layouts, and keep those that depend on answers."""
        for index, view in enumerate(outputs):
            tree = _tree([(each.path, each.outputs[index][1]) for each in results], _layout_key(view))
            _, layout = next(_leaves(tree))
            layout.put(view)
            if isinstance(tree, _Fork):
                self.layouts[id(view)] = self._flagged(tree, position)

    def _flagged(self, tree: Any, position: int) -> Any:
        """Return a tree of which the questions are asked by number of their answers."""
        if not isinstance(tree, _Fork):
            return tree
        test, *branches = tree
        if isinstance(test, Question):
            key = position, test
            if key not in self.flags:
                self.flags[key] = self._new(0).number
            test = Answered(self.flags[key])
        return _Fork(test, *(self._flagged(branch, position) for branch in branches))

    def _action(self, tree: Any, position: int) -> Action:
        if not isinstance(tree, _Fork):
            outcome: Outcome = tree
            return outcome
        test, *branches = tree
        flag = self.flags.get((position, test)) if isinstance(test, Question) else None
        then, otherwise = (self._action(branch, position) for branch in branches)
        if flag is None and _key(then) == _key(otherwise):
            return then
        return Choice(test, then, otherwise, flag)

    def _owners(
        self, results: Sequence[_Result], inputs: Iterable[View]
    ) -> list["_Buffer | None"]:
        """Return the buffer of each output: an input's where it always is, else a new one."""
        known = {id(view.buffer) for view in inputs}
        owners: list[_Buffer | None] = []
        for options in zip(*(result.outputs for result in results), strict=True):
            buffers = [buffer for buffer, _ in options]
            first = buffers[0]
            if all(buffer is first for buffer in buffers) and (first is None or id(first) in known):
                owners.append(first)
            else:
                new = next((b for b in buffers if b is not None and id(b) not in known), first)
                owners.append(self._new(new.nbytes))
        return owners

    def _outcome(
        self, result: _Result, owners: Sequence["_Buffer | None"], inputs: Sequence[View]
    ) -> Outcome:
        known = {id(view.buffer): view.buffer for view in inputs if view.buffer is not None}
        moved: list[tuple[int, int]] = []
        names: dict[int, int] = {}
        for (buffer, _), owner in zip(result.outputs, owners, strict=True):
            if buffer is None or owner is None:
                continue
            if id(buffer) not in known:
                names[id(buffer)] = owner.number
            elif owner is not buffer:
                moved.append((owner.number, buffer.number))
        now = {old: new for new, old in moved}
        elements, touched = result.temporary_elements, dict[int, int]()
        if not _is_zero(result.kernels):
            # CUDA counts inputs, however often (trace/streams.py).
            buffers = [view.buffer for view in inputs]
            seen = list(zip(buffers, result.read, strict=True))
            if self.device.backend == "metal":
                seen += [
                    (owner, layout.data_size)
                    for (buffer, layout), owner in zip(result.outputs, owners, strict=True)
                    if buffer is not None
                ]
            else:
                elements = 0
            for buffer, size in seen:
                if not isinstance(buffer, _Buffer):
                    continue
                if self.device.backend == "metal":
                    touched.setdefault(now.get(buffer.number, buffer.number), size)
                else:
                    elements += size
        own = owners[0].number if owners and owners[0] is not None else None
        holds = [view.buffer for view in inputs if isinstance(view.buffer, _Buffer)]
        later = [owner for owner in owners[1:] if owner is not None]
        numbers = dict.fromkeys(now.get(each.number, each.number)
            for each in (*holds, *later)
            if not each.is_weight
        )
        return Outcome(
            tuple(moved),
            tuple((names.get(id(each), TEMPORARY), each.nbytes) for each in result.made),
            result.kernels,
            0 if _is_zero(result.kernels) else elements,
            tuple(touched.items()),
            tuple(number for number in numbers if number != own),
        )

    def _make(self, held: Iterable[int]) -> None:
        """Give arrays that are not evaluated yet the buffers that they will be written into."""
        for view in (self.views[i] for i in held):
            for source in self.waiting.get(id(view), ()):
                same = source.shape == view.shape and source.itemsize == view.itemsize
                if source.buffer is not None and same and source.references == 1:
                    view.copy_layout(source)
                    view.buffer, source.buffer = source.buffer, None
                    break

    def _leaves(self, entries: Sequence[Entry]) -> Between:
        numbers: dict[int, int] = {}
        sources: dict[int, tuple[int, int]] = {}

        def number(buffer: int) -> int:
            return numbers.setdefault(buffer, len(numbers))

        def kept(entry: Entry) -> Kept:
            view = self.views[entry.array]
            waiting = self.waiting.get(id(view), ())
            for each in waiting:
                sources.setdefault(id(each), (number(each.buffer.number), each.references))
            positions = list(sources)
            return Kept(
                self._laid_out(view),
                None if entry.buffer is None else number(entry.buffer),
                tuple(positions.index(id(each)) for each in waiting),
            )

        return Between(tuple(map(kept, entries)), tuple(sources.values()))


def _laid_out(view: View, layout: Layout) -> LaidOut | None:
    default = tuple(map(expression, row_strides(view.shape)))
    strides = tuple(map(expression, layout.strides)) if layout.strides else default
    size = expression(layout.data_size)
    if strides == default and layout.row and layout.dense and size == expression(view.size):
        return None
    return LaidOut(strides, size, layout.row, layout.column, layout.dense)


def _flags(tree: Any) -> list[int]:
    """Return the flags of a tree, each once."""
    tests = (test for path, _ in _leaves(tree) for test, _ in path)
    return list(dict.fromkeys(test.flag for test in tests))


def _mapped(tree: Any, flag: Callable[[int], int], leaf: Callable[[Any], Any]) -> Any:
    """Return a tree with other flags and ends."""
    if not isinstance(tree, _Fork):
        return leaf(tree)
    branches = (_mapped(branch, flag, leaf) for branch in (tree.then, tree.otherwise))
    return _Fork(Answered(flag(tree.test.flag)), *branches)


def _is_weight(array: Array) -> bool:
    """Whether an array is outside of the allocator: `Replay` adds the bytes of all weights."""
    return array.role == "weight" or (array.role == "constant" and bool(array.shape))


def _is_zero(number: int) -> bool:
    return not int(number)


def _does_something(outcome: Outcome) -> bool:
    kernels = not _is_zero(outcome.kernels)
    return bool(outcome.moved or outcome.allocated or kernels or outcome.held)


def _key(value: Any) -> Any:
    """Return what equals that of another value without a comparison of sizes."""
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return expression(value) if isinstance(value, Size) else value


def _layout_key(view: View) -> Callable[[Any], Any]:
    """Return a function from layouts of a view to what is the same for equal ones."""
    default = row_strides(view.shape)

    def key(layout: Layout) -> Any:
        return _key(layout._replace(strides=layout.strides or default))

    return key


def _leaves(tree: Any) -> Iterator[tuple[_Path, Any]]:
    """Yield the ends of a tree, with the way to them."""
    if not isinstance(tree, _Fork):
        yield (), tree
        return
    for answer, branch in ((True, tree.then), (False, tree.otherwise)):
        for path, leaf in _leaves(branch):
            yield ((tree.test, answer), *path), leaf


def _tree(leaves: Sequence[tuple[_Path, Any]], key: Callable[[Any], Any] | None = None) -> Any:
    """Return the tree of ends; forks whose ends are the same by ``key`` are none."""
    path, leaf = leaves[0]
    if not path:
        return leaf
    then, otherwise = (
        _tree([(rest, leaf) for (first, *rest), leaf in leaves if first[1] is answer], key)
        for answer in (True, False)
    )
    if key and not isinstance(then, _Fork) and not isinstance(otherwise, _Fork):
        if key(then) == key(otherwise):
            return then
    return _Fork(path[0][0], then, otherwise)


def _results(op: _Lowering, rule: Any, path: _Path) -> list[_Result]:
    """Run a rule once for each way to answer its questions, after tests of what its inputs are."""
    buffers = [(view.buffer, view.buffer.references) for view in op.inputs if view.buffer]
    tape = op.memory
    assert isinstance(tape, _Tape)
    results: list[_Result] = []
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        script = scripts.pop(0)
        for buffer, references in buffers:
            buffer.references = references
        for view in op.outputs:
            view.buffer = None
            view.fresh()
        op.script, op.asked, tape.made = script, [], []
        op.temporaries, op.temporary_elements, op.kernels = [], 0, 0
        rule(op)
        touched = tuple(view.data_size for view in op.inputs)
        results.append(
            _Result(
                (*path, *op.asked),
                tuple((view.buffer, Layout.of(view)) for view in op.outputs),
                touched,
                tuple(tape.made),
                op.temporary_elements,
                op.kernels,
            )
        )
        answers = tuple(answer for _, answer in op.asked)
        scripts += [
            (*answers[:at], False) for at in range(len(script), len(answers)) if answers[at]
        ]
    for buffer, references in buffers:
        buffer.references = references
    return results
