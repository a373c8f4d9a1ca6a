"""A recorded call as steps: what each kernel allocates, writes over, reads and lets go.

The rules of the trace run once over a call. Fixed is then what the graph alone decides: MLX's
order, which views share a buffer, where each buffer dies, which kernels run. What sizes or the
device's progress decide stays open: a step has a tree of choices, of which each asks whether an
input's buffer may be written over. With `Size` in place of numbers, bytes and kernels are
expressions, and the comparisons that the rules made are guards.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import Version
from memfit.estimators.programs.answers import Buffer, Result, Trial, results
from memfit.estimators.programs.forks import (
    Fork,
    Path,
    Test,
    consistent,
    ends_of,
    flags_of,
    identity,
    mapped,
    tree_of,
)
from memfit.estimators.programs.steps import (
    NOTHING,
    TEMPORARY,
    Action,
    Between,
    Choice,
    Entry,
    Kept,
    Layout,
    Lowered,
    LoweringError,
    Marked,
    Outcome,
    Step,
    laid_out_as,
)
from memfit.estimators.trace.buffers import rule_of
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.layouts import Allocation, View, row_strides
from memfit.estimators.trace.replay import (
    becomes,
    count_users,
    is_outside,
    sample_of,
    unmade_sources,
    view_of,
)
from memfit.estimators.trace.schedule import evaluation_order, unmerged
from memfit.estimators.trace.shared_rules import concatenate

# What lost arrays were to be made from, in place of the view of one.
_LOST = -1


def lower(
    call: Call,
    device: Device,
    mlx: Version,
    found: Between = NOTHING,
    sizes: Mapping[str, int] = {},
) -> Lowered:
    """Return the steps of a call that finds what the call before it has left.

    ``sizes`` are those of both calls by name: `before`.

    Raises:
        LoweringError: when steps cannot tell what the call does.
    """
    return _Pass(unmerged(call), device, mlx).lowered(found, sizes)


class _Pass:
    """One walk over a call."""

    def __init__(self, call: Call, device: Device, mlx: Version) -> None:
        self._call, self._device = call, device
        self._trial = Trial(device, mlx)
        self._views = [view_of(array) for array in call.arrays]
        self._buffers: list[Buffer] = []
        self._dead: list[int] = []
        self._shared: set[tuple[int, int]] = set()
        # Of views that lie differently by what happened: trees of flags.
        self._layouts: dict[int, Any] = {}
        # What arrays are made from that an earlier call has left for this one, by their views.
        self._waiting: dict[int, list[View]] = {}

    def lowered(self, found: Between, sizes: Mapping[str, int]) -> Lowered:
        call, views = self._call, self._views
        order = evaluation_order(call)
        caches = self._take_over(found, sizes)
        inputs = tuple(self._placed_inputs())
        count_users(call, order, views)
        unmade = unmade_sources(call, order, views)
        for view in views:
            if not view.references:
                self._drop(view)
        unused = self._died()
        steps = tuple(step for position in order for step in self._step(position))
        for sources in self._waiting.values():
            self._release(sources)
        held = self._hold(unmade)
        self._release(views[i] for i in (*call.evaluated, *call.of_role("tokens")))
        sampled = [views[i].buffer for i in sample_of(call)]
        return Lowered(
            steps=steps,
            weights=frozenset(each.number for each in self._buffers if each.is_weight),
            caches=caches,
            inputs=inputs,
            unused=unused,
            end=self._died(),
            held=held,
            leaves=self._leaves(held),
            samples=tuple(each.number for each in sampled if isinstance(each, Buffer)),
            sample_bytes=tuple(call.arrays[i].nbytes for i in call.evaluated),
            first=call.nodes[order[0]].name if order else "",
        )

    def _new(self, nbytes: int = 0, *, is_weight: bool = False) -> Buffer:
        buffer = Buffer(len(self._buffers), nbytes, is_weight=is_weight)
        self._buffers.append(buffer)
        return buffer

    def _take_over(self, found: Between, sizes: Mapping[str, int]) -> tuple[Entry, ...]:
        """Give the caches the buffers and layouts that the call before has left."""
        caches = self._call.of_role("cache")
        buffers: dict[int, Buffer] = {}
        for position, kept in zip(caches, found.kept or [None] * len(caches), strict=True):
            view = self._views[position]
            if kept is None or kept.buffer is None:
                view.buffer = self._new(view.nbytes)
            else:
                self._lay(view, kept.laid_out, sizes)
                view.buffer = buffers.get(kept.buffer) or self._new(view.nbytes)
                buffers[kept.buffer] = view.buffer
            view.buffer.references += 1
        taken = Counter(i for kept in found.kept if kept for i in kept.waiting)
        sources = [View((), 1) for _ in found.sources]
        for index, (number, users) in enumerate(found.sources):
            if index in taken:
                view = sources[index]
                view.references = users
                view.buffer = buffers[number] = buffers.get(number) or self._new()
                view.buffer.references += 1
                # Of caches that are lost it goes when the call has been evaluated.
                self._waiting.setdefault(_LOST, []).extend([view] * (users - taken[index]))
        for position, kept in zip(caches, found.kept, strict=False):
            if kept and kept.waiting:
                self._waiting[id(self._views[position])] = [sources[i] for i in kept.waiting]
        return tuple(map(self._entry, caches))

    def _lay(self, view: View, laid_out: Any, sizes: Mapping[str, int]) -> None:
        """Lay a cache as the call before has left it."""
        numbers = {flag: self._new().number for flag in flags_of(laid_out)}
        fresh = Layout.of(view)
        tree = mapped(
            laid_out,
            lambda test: Marked(numbers[test[0]]),
            lambda each: fresh if each is None else each.layout(sizes),
        )
        next(ends_of(tree))[1].put(view)
        if numbers:
            self._layouts[id(view)] = tree

    def _placed_inputs(self) -> Iterator[tuple[int, int, str]]:
        """Give buffers to the other arrays from before the call; yield those of the allocator."""
        for view, array in zip(self._views, self._call.arrays, strict=True):
            if array.role == "computed" or view.buffer is not None:
                continue
            is_weight = is_outside(array)
            view.buffer = buffer = self._new(array.nbytes, is_weight=is_weight)
            view.references = int(is_weight or array.role == "tokens")
            buffer.references = 1
            if not is_weight:
                yield buffer.number, array.nbytes, array.role

    def _died(self) -> tuple[int, ...]:
        dead = tuple(self._dead)
        self._dead.clear()
        return dead

    def _drop(self, view: View) -> None:
        buffer, view.buffer = view.buffer, None
        if isinstance(buffer, Buffer):
            buffer.references -= 1
            if not buffer.references and not buffer.is_weight:
                self._dead.append(buffer.number)

    def _release(self, views: Iterable[View]) -> None:
        for view in views:
            view.references -= 1
            if not view.references:
                self._drop(view)

    def _step(self, position: int) -> Iterator[Step]:
        node, op = self._call.nodes[position], self._trial
        op.name, op.arguments = node.name, node.arguments
        op.inputs = inputs = [self._views[i] for i in node.inputs]
        op.outputs = outputs = [self._views[i] for i in node.outputs]
        rule = rule_of(self._device.backend, node.name)
        ways = self._ways_to_lie(inputs, copies=rule is concatenate)
        found = [each for path in ways for each in results(op, rule, path)]
        owners = self._owners(found)
        outcomes = [self._outcome(result, owners) for result in found]
        for index, (view, owner) in enumerate(zip(outputs, owners, strict=True)):
            marks = self._lay_output(view, [each.outputs[index][1] for each in found])
            outcomes = [
                outcome._replace(marks=outcome.marks + marked)
                for outcome, marked in zip(outcomes, marks, strict=True)
            ]
            view.buffer = owner
            if owner is not None:
                owner.references += 1
        paths = (each.path for each in found)
        action = _action(tree_of(list(zip(paths, outcomes, strict=True))))
        for view in inputs:
            self._release([view])
            self._release(self._waiting.pop(id(view), ()))
        for view in outputs:
            if not view.references:
                self._drop(view)
        dead = self._died()
        # The CPU counts each operation as a dispatch.
        is_empty = all(outcome.is_empty for outcome in outcomes)
        if dead or not is_empty or self._device.backend == "cpu":
            yield Step(node.name, position, action, dead)

    def _ways_to_lie(self, inputs: Sequence[View], *, copies: bool) -> Iterator[Path]:
        """Lay the inputs in each way they may lie together, one after another.

        Of inputs that are only copied the sizes count: a scan joins hundreds of them.
        """
        views = {id(view): view for view in inputs if id(view) in self._layouts}
        if copies:
            views = {key: view for key, view in views.items() if self._is_sized_by_layout(key)}
        trees = [list(ends_of(self._layouts[key])) for key in views]
        for ends in product(*trees):
            path = consistent([path for path, _ in ends])
            if path is not None:
                for view, (_, layout) in zip(views.values(), ends, strict=True):
                    layout.put(view)
                yield path

    def _is_sized_by_layout(self, key: int) -> bool:
        return len({identity(each.data_size) for _, each in ends_of(self._layouts[key])}) > 1

    def _lay_output(
        self, view: View, layouts: Sequence[Layout]
    ) -> list[tuple[tuple[int, bool], ...]]:
        """Lay an output; return the flags that each result sets to tell how it does."""
        layouts[0].put(view)
        if len(layouts) == 1:
            return [()]
        default = row_strides(view.shape)
        keys = [identity(each._replace(strides=each.strides or default)) for each in layouts]
        different = dict(zip(reversed(keys), reversed(layouts), strict=True))
        *others, last = (different[key] for key in dict.fromkeys(keys))
        flags = [self._new().number for _ in others]
        tree: Any = last
        for flag, layout in zip(reversed(flags), reversed(others), strict=True):
            tree = Fork(Marked(flag), layout, tree)
        if flags:
            self._layouts[id(view)] = tree
        order = list(dict.fromkeys(keys))
        return [
            tuple((flag, order.index(key) == index) for index, flag in enumerate(flags))
            for key in keys
        ]

    def _owners(self, found: Sequence[Result]) -> list[Buffer | None]:
        """Return the buffer of each output: an input's where it always is, else a new one."""
        known = {id(view.buffer) for view in self._trial.inputs}
        owners: list[Buffer | None] = []
        for options in zip(*(result.outputs for result in found), strict=True):
            buffers: list[Any] = [buffer for buffer, _ in options]
            first = buffers[0]
            is_same = all(buffer is first for buffer in buffers)
            if is_same and (first is None or id(first) in known):
                owners.append(first)
            else:
                new = (b for b in buffers if b is not None and id(b) not in known)
                owners.append(self._new(next(new, first).nbytes))
        return owners

    def _outcome(self, result: Result, owners: Sequence[Buffer | None]) -> Outcome:
        inputs = [view.buffer for view in self._trial.inputs]
        known = {id(buffer) for buffer in inputs}
        # Outputs in an input's buffer, which has the output's number too.
        now: dict[int, int] = {}
        made: dict[int, int] = {}
        for (buffer, _), owner in zip(result.outputs, owners, strict=True):
            if owner is None or buffer is None:
                continue
            if id(buffer) not in known:
                made[id(buffer)] = owner.number
            elif owner is not buffer:
                assert isinstance(buffer, Buffer)
                now[buffer.number] = owner.number
                self._shared.add((owner.number, buffer.number))
        read = list(zip(inputs, result.read, strict=True))
        written = [(o, lay.data_size) for o, (_, lay) in zip(owners, result.outputs, strict=True)]
        elements, touched = self._touched(result, read, written)
        own = owners[0].number if owners and owners[0] else None
        held = (now.get(b.number, b.number) for b in (*_own(inputs), *_own(owners[1:])))
        return Outcome(
            tuple((new, old) for old, new in now.items()),
            tuple((made.get(id(each), TEMPORARY), each.nbytes) for each in result.made),
            result.kernels,
            elements,
            tuple({now.get(number, number): size for number, size in touched.items()}.items()),
            tuple(number for number in dict.fromkeys(held) if number != own),
        )

    def _touched(
        self,
        result: Result,
        read: list[tuple[Allocation | None, int]],
        written: list[tuple[Buffer | None, int]],
    ) -> tuple[int, dict[int, int]]:
        """Return elements that always count, and those that count once a batch: `Stream`."""
        if not int(result.kernels):
            return 0, {}
        if self._device.backend != "metal":
            return sum(size for buffer, size in read if buffer is not None), {}
        touched: dict[int, int] = {}
        for buffer, size in (*read, *written):
            if isinstance(buffer, Buffer):
                touched.setdefault(buffer.number, size)
        return result.temporary_elements, touched

    def _hold(self, unmade: dict[int, list[View]]) -> tuple[Entry, ...]:
        """Return what Python refers to when the call returns, without what was sampled."""
        sample, held = sample_of(self._call), list(dict.fromkeys(self._call.held))
        for view in (self._views[i] for i in held):
            for source in unmade.get(id(view), ()):
                # It will be written into this buffer.
                if source.buffer is not None and becomes(source, view) and source.references == 1:
                    view.copy_layout(source)
                    if id(source) in self._layouts:
                        self._layouts[id(view)] = self._layouts[id(source)]
                    view.buffer, source.buffer = source.buffer, None
                    break
        held = [position for position in held if position not in sample]
        numbers = {each.number for each in _own(self._views[i].buffer for i in held)}
        if any(numbers.issuperset(pair) for pair in self._shared):
            raise LoweringError("two caches happen to lie in one buffer")
        # What is held itself goes on as a cache, or is gone.
        kept = {id(self._views[position]) for position in held}
        self._waiting = {
            made: [each for each in sources if _is_own(each.buffer) and id(each) not in kept]
            for made, sources in unmade.items()
        }
        return tuple(map(self._entry, held))

    def _entry(self, position: int) -> Entry:
        view = self._views[position]
        waiting = tuple(b.number for b in _own(x.buffer for x in self._waiting.get(id(view), ())))
        number = view.buffer.number if isinstance(view.buffer, Buffer) else None
        flags = tuple(flags_of(self._layouts.get(id(view))))
        return Entry(position, number, view.shape, view.itemsize, waiting, flags)

    def _leaves(self, held: Sequence[Entry]) -> Between:
        numbers: dict[int, int] = {}
        sources: dict[int, tuple[int, int]] = {}
        kept: list[Kept] = []
        for entry in held:
            view = self._views[entry.array]
            tree = self._layouts.get(id(view), Layout.of(view))
            flags = {flag: index for index, flag in enumerate(entry.flags)}
            laid_out = mapped(tree, _renamed(flags), partial(laid_out_as, view))
            waiting = self._waiting.get(id(view), ())
            for source, number in zip(waiting, entry.waiting, strict=True):
                buffer = numbers.setdefault(number, len(numbers))
                sources.setdefault(id(source), (buffer, source.references))
            positions = list(sources)
            own = entry.buffer
            place = None if own is None else numbers.setdefault(own, len(numbers))
            places = tuple(positions.index(id(source)) for source in waiting)
            kept.append(Kept(laid_out, place, places))
        return Between(tuple(kept), tuple(sources.values()))


def _action(tree: Any) -> Action:
    if isinstance(tree, Fork):
        return Choice(tree.test, _action(tree.then), _action(tree.otherwise))
    outcome: Outcome = tree
    return outcome


def _own(buffers: Iterable[Allocation | None]) -> Iterator[Buffer]:
    """Yield those of the allocator."""
    return (each for each in buffers if isinstance(each, Buffer) and _is_own(each))


def _is_own(buffer: Allocation | None) -> bool:
    return isinstance(buffer, Buffer) and not buffer.is_weight


def _renamed(flags: Mapping[int, int]) -> Callable[[Test], Test]:
    return lambda test: Marked(flags[test[0]])
