"""A lowered call: its steps, what they find, and what they leave for the next call.

Buffers have numbers, and so have the flags by which a step tells later ones how an array lies.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.programs.expressions import evaluate
from memfit.estimators.programs.sizes import expression
from memfit.estimators.trace.layouts import Strides, View, row_strides

_BEFORE = "_before"
_NAME = re.compile(r"[A-Za-z_]\w*")
TEMPORARY = -1
"""The number of a buffer that a kernel has for itself."""


class LoweringError(UnsupportedError):
    """A call does what steps cannot tell."""


class Outcome(NamedTuple):
    """What a step does to buffers."""

    shared: tuple[tuple[int, int], ...]
    """Outputs that lie in an input's buffer, with the number that it has too."""
    allocated: tuple[tuple[int, int], ...]
    """Buffers and their bytes."""
    kernels: int
    elements: int
    """Elements that count however often the batch has touched their buffers."""
    touched: tuple[tuple[int, int], ...]
    """Buffers that count once a batch, and their elements."""
    held: tuple[int, ...]
    """Buffers that live until the device has run the step."""
    marks: tuple[tuple[int, bool], ...] = ()
    """Flags that say how an output lies where that depends on what happened."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing happens: a view."""
        found = self.shared or self.allocated or self.held or self.marks
        return not (found or int(self.kernels))


class Question(NamedTuple):
    """Whether a buffer may be written over, or shared."""

    buffer: int
    limit: int | None
    """The most bytes it may have, None: any."""
    waits: bool
    """Whether the device must have run everything that reads it."""


class Marked(NamedTuple):
    """Whether an earlier step has set a flag."""

    flag: int


class Choice(NamedTuple):
    """What a step does depends on a test."""

    test: Question | Marked
    then: "Outcome | Choice"
    otherwise: "Outcome | Choice"


Action: TypeAlias = Outcome | Choice


class Step(NamedTuple):
    """One operation."""

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
        """Return that of a view."""
        return cls(view.given_strides, view.data_size, view.row, view.column, view.dense)

    def put(self, view: View) -> None:
        """Lay a view so."""
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
        """Return it with sizes, in which those of the call before have the names of `before`."""
        strides = tuple(evaluate(_named_before(text), sizes) for text in self.strides)
        size = evaluate(_named_before(self.data_size), sizes)
        return Layout(strides, size, self.row, self.column, self.dense)


def before(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a call under the names that they have for the next one."""
    return {_named_before(name): size for name, size in sizes.items()}


def _is_of_before(text: str) -> bool:
    """Whether an expression is in sizes of the call before."""
    return _BEFORE in text


@lru_cache(maxsize=1024)
def _named_before(text: str) -> str:
    return _NAME.sub(rf"\g<0>{_BEFORE}", text)


def laid_out_as(view: View, layout: Layout) -> LaidOut | None:
    """Return how a call leaves an array, None: in rows."""
    default = tuple(map(expression, row_strides(view.shape)))
    strides, size = default, expression(layout.data_size)
    if layout.strides:
        strides = tuple(map(expression, _in_own_sizes(view.shape, layout.strides)))
    if strides == default and layout.row and layout.dense and size == expression(view.size):
        return None
    return LaidOut(strides, expression(_fixed(layout.data_size)), *layout[2:])


def _in_own_sizes(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Return strides in sizes of this call: what an earlier call laid out may name its sizes."""
    if not any(map(_is_of_before, map(expression, strides))):
        return strides
    own, step = list(strides), 1
    for axis in sorted(range(len(shape)), key=lambda axis: int(strides[axis])):
        if int(strides[axis]) == int(step):
            own[axis] = step
        step = step * shape[axis]
    # Each comparison is a guard, under which the expressions are the same.
    if all(int(a) == int(b) and a == b for a, b in zip(strides, own, strict=True)):
        strides = tuple(own)
    return tuple(map(_fixed, strides))


def _fixed(size: int) -> int:
    """Return a size as a number, guarded, where the next call has no name for what it is of."""
    number = int(size)
    return number if _is_of_before(expression(size)) and size == number else size


class Kept(NamedTuple):
    """What of an array remains between two calls."""

    laid_out: Any
    """A `LaidOut`, None in rows as a new array, or a `Fork` of both by the flags of its entry."""
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

    def handed_over(
        self, left: Iterable[tuple[Any, int]], wanted: Iterable[tuple[Any, int]]
    ) -> "Between":
        """Return what caches find of it, by shapes and bytes of an item of what it is ``left``."""
        known = defaultdict[tuple[Any, int], deque[Kept]](deque)
        for key, kept in zip(left, self.kept, strict=True):
            if kept is not None and kept.buffer is not None:
                known[key].append(kept)
        found = (known[key].popleft() if known.get(key) else None for key in wanted)
        return Between(tuple(found), self.sources)


NOTHING = Between(())


class Entry(NamedTuple):
    """An array of a cache that a call finds or leaves."""

    array: int
    """Its position in the call's arrays."""
    buffer: int | None
    shape: tuple[int, ...]
    itemsize: int
    waiting: tuple[int, ...] = ()
    """Buffers of what it will be made from."""
    flags: tuple[int, ...] = ()
    """Flags that say how it lies."""


class Lowered(NamedTuple):
    """A call as steps, for any sizes for which the comparisons of the rules come out alike."""

    steps: tuple[Step, ...]
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
