"""Blocks of a program as Python code, a few instructions a step.

A buffer is three variables: its real bytes ``z``, the last batch of work that reads it ``h``, and
the last one that has counted it ``t``. It is free when nothing in the graph refers to it and that
batch has run, so no references are counted. What `machine` does step by step, this code does for
devices with batches that free all their buffers together; tests compare both.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from memfit.estimators.programs.program import Block, Number, Program, Slot
from memfit.estimators.programs.steps import Choice, Marked, Outcome, Question, Step

_PARAMETERS = "active,kernels,elements,batch,done,cur,big,most"
_HEADER = """def {name}(lists,{parameters},loaded):
 size,last,touched,flag,free,inert,useful,v,a,lim,shapes,held,ending,sampled,saved,close,pending,ops,mebi=lists
 here=at=-1"""
_FREE = "if useful[n]: insort(free,n)", "else: inert.append(n)"


# Bytes, the last batch of work that reads it, and the last that has counted it.
Buffer = tuple[int, int, int]


class Kept(NamedTuple):
    """An array of a cache between two calls."""

    key: tuple[Any, ...]
    """Its shape and the bytes of an item."""
    buffer: Buffer | None
    waiting: tuple[Buffer, ...]
    flags: tuple[bool, ...]


class NoCodeError(Exception):
    """A buffer of a program has two names at once: its references have to be counted."""


class Code(NamedTuple):
    """The functions of a program's blocks, and what passes between them."""

    program: Program
    blocks: tuple[Callable[..., Any], ...]
    carried: tuple[Slot, ...]
    """A layer's own buffers that the next one reads."""
    requests: tuple[Number, ...]
    """Bytes that steps allocate."""
    repeats: bool
    """Whether layers may be left out: each has all it waits for when its call begins."""
    saved_at: Mapping[int, int]
    """By layer which one it is of those that save buffers for steps after all layers."""

    @property
    def is_swept(self) -> bool:
        """Whether steps follow on all layers that belong to one before."""
        return bool(self.saved_at)


def code_of(program: Program) -> Code:
    """Return the code of a program.

    Raises:
        NoCodeError: when it needs counted references.
    """
    carried = sorted({slot for block in program.blocks for slot in _carried(block, program.local)})
    requests: set[Number] = set()
    sources = []
    for number, block in enumerate(program.blocks):
        writer = _Writer(program, block, carried)
        sources.append(writer.source(f"block{number}"))
        requests |= writer.requests
    names: dict[str, Any] = {"bisect_left": bisect_left, "insort": insort, "kept": Kept}
    # Made of this module's templates and of expressions of the data, which have no other names.
    exec(compile("\n".join(sources), "<program>", "exec"), names)
    saving = (
        p for p, n in zip(program.places, program.order, strict=True) if program.blocks[n].saved
    )
    entries = [e for block in program.blocks for e in (*block.caches, *block.held)]
    return Code(
        program,
        tuple(names[f"block{number}"] for number in range(len(sources))),
        tuple(carried),
        tuple(sorted(requests)),
        not any(entry.waiting or entry.flags for entry in entries),
        {place: position for position, place in enumerate(saving)},
    )


def _carried(block: Block, local: int) -> Iterator[Slot]:
    return (slot - local for slot in _slots(block) if local <= slot < 2 * local)


def _slots(block: Block) -> Iterator[Slot]:
    for step in block.steps:
        yield from step.dead
        for test in _tests(step.action):
            yield test[0]
        for outcome in _outcomes(step.action):
            yield from (slot for pair in outcome.shared for slot in pair)
            yield from (slot for slot, _ in outcome.touched)
            yield from outcome.held
    for entry in block.held:
        yield from (*([] if entry.slot is None else [entry.slot]), *entry.waiting, *entry.flags)
    yield from (*block.end, *block.samples, *(here for _, here in block.shared))


def _tests(action: Any) -> Iterator[Question | Marked]:
    if isinstance(action, Choice):
        yield action.test
        yield from _tests(action.then)
        yield from _tests(action.otherwise)


def _outcomes(action: Any) -> Iterator[Outcome]:
    if isinstance(action, Choice):
        yield from _outcomes(action.then)
        yield from _outcomes(action.otherwise)
    else:
        yield action


class _Writer:
    """Writes one block."""

    def __init__(self, program: Program, block: Block, carried: Iterable[Slot]) -> None:
        self._block, self._local = block, program.local
        self._constants = program.constants
        self._weights = {
            slot for each in program.blocks for slot in each.weights if slot >= program.local
        } | set(block.weights)
        self._carried = carried
        self._lines: list[str] = []
        self.requests: set[Number] = set()

    def _write(self, depth: int, *lines: str) -> None:
        self._lines += [" " * depth + line for line in lines]

    def _of(self, letter: str, name: str, slot: Slot) -> str:
        return f"{letter}{slot}" if slot < self._local else f"{name}[{slot}]"

    def _size(self, slot: Slot) -> str:
        return self._of("z", "size", slot)

    def _last(self, slot: Slot) -> str:
        return self._of("h", "last", slot)

    def _touch(self, slot: Slot) -> str:
        return self._of("t", "touched", slot)

    def _flag(self, slot: Slot) -> str:
        return self._of("f", "flag", slot)

    def _value(self, number: Number) -> str:
        return self._constants.get(number) or f"v[{number}]"

    def _triple(self, slot: Slot) -> str:
        return f"{self._size(slot)},{self._last(slot)},{self._touch(slot)}"

    def source(self, name: str) -> str:
        """Return the block as a function."""
        block = self._block
        for step in block.steps:
            for outcome in _outcomes(step.action):
                if any(old not in step.dead for _, old in outcome.shared):
                    raise NoCodeError
        self._lines = [_HEADER.format(name=name, parameters=_PARAMETERS)]
        self._load()
        for position, step in enumerate(block.steps):
            self._action(step.action, step, position, 1)
        self._leave()
        self._write(1, f"return {_PARAMETERS},here,at")
        return "\n".join(self._lines)

    def _load(self) -> None:
        """Write where a call's buffers from before are: `runner` loads them in this order."""
        for position, cache in enumerate(self._block.caches):
            entry = f"loaded[{position}]"
            assert cache.slot is not None
            self._write(1, f"{self._triple(cache.slot)}={entry}[0]")
            for index, slot in enumerate(cache.waiting):
                self._write(1, f"{self._triple(slot)}={entry}[1][{index}]")
            for index, slot in enumerate(cache.flags):
                self._write(1, f"{self._flag(slot)}={entry}[2][{index}]")
        for position, (slot, *_) in enumerate(self._block.inputs, len(self._block.caches)):
            self._write(1, f"{self._triple(slot)}=loaded[{position}][0]")
        first = len(self._block.caches) + len(self._block.inputs)
        for position, slot in enumerate(self._block.taken, first):
            self._write(1, f"{self._triple(slot)}=loaded[{position}][0]")
        for slot in self._block.weights:
            self._write(1, f"{self._touch(slot)}=-1")

    def _leave(self) -> None:
        """Write what later blocks and calls find."""
        block, position = self._block, 0
        made: dict[Slot, str] = {}

        def buffer(slot: Slot) -> str:
            if slot not in made:
                made[slot] = f"b{len(made)}"
                self._write(1, f"{made[slot]}=({self._triple(slot)})")
            return made[slot]

        for position, entry in enumerate(block.held):
            own = "None" if entry.slot is None else buffer(entry.slot)
            waiting = "".join(f"{buffer(slot)}," for slot in entry.waiting)
            flags = "".join(f"{self._flag(slot)}," for slot in entry.flags)
            self._write(1, f"held.append(kept(shapes[{position}],{own},({waiting}),({flags})))")
        for name, slots in (("ending", block.end), ("sampled", block.samples)):
            for slot in slots:
                self._write(1, f"{name}.append(({self._triple(slot)}))")
        if block.saved:
            self._write(1, f"saved.append(({''.join(f'{buffer(slot)},' for slot in block.saved)}))")
        mine = {slot for slot in _own(block) if 0 <= slot < self._local}
        for slot in sorted(
            mine.intersection((*self._carried, *(here for _, here in block.shared)))
        ):
            if slot in self._flags():
                self._write(1, f"flag[{slot}]=f{slot}")
            elif slot in block.weights:
                self._write(1, f"touched[{slot}]=t{slot}")
            else:
                self._write(1, f"size[{slot}],last[{slot}],touched[{slot}]={self._triple(slot)}")

    def _flags(self) -> set[Slot]:
        marked = (o.marks for step in self._block.steps for o in _outcomes(step.action))
        return {flag for marks in marked for flag, _ in marks} | {
            flag for cache in self._block.caches for flag in cache.flags
        }

    def _action(self, action: Any, step: Step, position: int, depth: int) -> None:
        if isinstance(action, Choice):
            self._write(depth, f"if {self._test(action.test)}:")
            self._action(action.then, step, position, depth + 1)
            self._write(depth, "else:")
            self._action(action.otherwise, step, position, depth + 1)
            return
        before = len(self._lines)
        self._outcome(action, step, position, depth)
        if len(self._lines) == before and depth > 1:
            self._write(depth, "pass")

    def _test(self, test: Question | Marked) -> str:
        if isinstance(test, Marked):
            return self._flag(test.flag)
        asked = [f"{self._last(test.buffer)}<done"] if test.waits else []
        if test.limit is not None:
            asked.append(f"{self._size(test.buffer)}<={self._value(test.limit)}")
        return " and ".join(asked) or "True"

    def _outcome(self, outcome: Outcome, step: Step, position: int, depth: int) -> None:
        for flag, value in outcome.marks:
            self._write(depth, f"{self._flag(flag)}={value}")
        for new, old in outcome.shared:
            self._write(depth, f"{self._triple(new)}={self._triple(old)}")
        moved = {old for _, old in outcome.shared}
        fresh = self._allocate(outcome.allocated, position, depth)
        held = [slot for slot in outcome.held if slot not in self._weights]
        touched = self._count(outcome, fresh, depth)
        for slot in fresh - touched:
            self._write(depth, f"{self._touch(slot)}=-1")
        for slot in fresh.difference(held):
            self._write(depth, f"{self._last(slot)}=-1")
        dead = [slot for slot in step.dead if slot not in moved]
        for slot in held:
            # What the device reads last is let go with the open batch.
            is_last = slot in dead
            line = f"cur.append({self._size(slot)})" if is_last else f"{self._last(slot)}=batch"
            self._write(depth, line)
        if outcome.kernels:
            self._write(depth, "if kernels>ops or elements>=mebi:")
            self._write(depth + 1, "cur,active,done,most=close(cur,active,done,most)", "batch+=1")
            self._write(depth + 1, "kernels=elements=0")
        for slot in dead:
            if slot not in held:
                self._release(slot, depth, is_unread=slot in fresh)

    def _allocate(
        self, allocated: Sequence[tuple[Slot, Number]], position: int, depth: int
    ) -> set[Slot]:
        """Write allocations; return the buffers that are new."""
        for slot, number in allocated:
            self.requests.add(number)
            inner = depth
            if slot < 0 and number not in self._constants:
                # Parts of a product that these sizes do not split.
                self._write(depth, f"if a[{number}]:")
                inner += 1
            self._write(
                inner,
                f"n=a[{number}];i=bisect_left(free,n)",
                f"if i<len(free) and free[i]<lim[{number}]: n=free.pop(i)",
                "active+=n",
                "if n>big: big=n",
            )
            kept = "cur.append(n)" if slot < 0 else f"{self._size(slot)}=n"
            self._write(inner, kept)
        if allocated:
            self._write(depth, f"if active>here: here=active;at={position}")
        return {slot for slot, _ in allocated if slot >= 0}

    def _count(self, outcome: Outcome, fresh: set[Slot], depth: int) -> set[Slot]:
        """Write what the open batch counts; return the buffers whose variables are set."""
        if not outcome.kernels and not outcome.elements and not outcome.touched:
            return set()
        more = [self._value(outcome.elements)] if outcome.elements else []
        for slot, number in outcome.touched:
            name, size = self._touch(slot), self._value(number)
            if slot in fresh:
                more.append(size)
                self._write(depth, f"{name}=batch")
            else:
                self._write(depth, f"if {name}!=batch: {name}=batch;elements+={size}")
        if more:
            self._write(depth, f"elements+={'+'.join(more)}")
        if outcome.kernels:
            self._write(depth, f"kernels+={self._value(outcome.kernels)}")
        return {slot for slot, _ in outcome.touched}

    def _release(self, slot: Slot, depth: int, *, is_unread: bool) -> None:
        free = ("active-=n", *_FREE)
        self._write(depth, f"n={self._size(slot)}")
        if is_unread:
            self._write(depth, *free)
            return
        self._write(depth, f"if {self._last(slot)}<done:")
        self._write(depth + 1, *free)
        self._write(depth, f"else: pending(cur,batch,done,{self._last(slot)}).append(n)")


def _own(block: Block) -> Iterator[Slot]:
    """Yield the buffers and flags that a block defines."""
    for entry in block.caches:
        yield from (*([] if entry.slot is None else [entry.slot]), *entry.waiting, *entry.flags)
    yield from (slot for slot, *_ in block.inputs)
    yield from (*block.weights, *block.taken)
    for step in block.steps:
        for outcome in _outcomes(step.action):
            yield from (new for new, _ in outcome.shared)
            yield from (slot for slot, _ in outcome.allocated)
            yield from (flag for flag, _ in outcome.marks)
