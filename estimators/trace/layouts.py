"""The layout of an array in its buffer, and the layouts of views of it.

MLX decides by these flags whether an operation copies, donates or shares: contiguous (no gaps),
row and column contiguous, and the elements from first to last (array.h, Flags). Sources:
mlx/backend/common/{common,slicing,broadcasting}.cpp and utils.h.
"""

from math import prod

Strides = tuple[int, ...]


class Allocation:
    """One allocation: who made it, how many refer to it, and when it lived (in operations)."""

    # A trace has one for each buffer of a call: slots instead of a dictionary.
    __slots__ = ("born", "died", "nbytes", "operation", "references")

    def __init__(self, nbytes: int, operation: str, born: int) -> None:
        self.nbytes = nbytes
        self.operation = operation
        self.references = 0
        self.born = born
        self.died: int | None = None

    def copied(self) -> "Allocation":
        """Return the same of another run, with as many references."""
        other = Allocation(self.nbytes, self.operation, self.born)
        other.references, other.died = self.references, self.died
        return other


class View:
    """An array as MLX holds it; ``references`` are the users and holders of the array itself."""

    # row, column and dense are MLX's flags row_contiguous, col_contiguous and contiguous.
    # data_size is in elements; a slice with gaps counts the gaps.
    __slots__ = (
        "_strides",
        "buffer",
        "column",
        "data_size",
        "dense",
        "itemsize",
        "nbytes",
        "references",
        "row",
        "shape",
        "size",
    )

    def __init__(self, shape: tuple[int, ...], itemsize: int) -> None:
        self.shape = shape
        self.itemsize = itemsize
        self.size = size = prod(shape)
        self.nbytes = size * itemsize
        self.references = 0
        self.buffer: Allocation | None = None
        # As `fresh`, which would be a call for each of the many arrays.
        self._strides: Strides | None = None
        self.data_size = size
        self.row = self.dense = True
        self.column = _is_line(shape)

    def copied(self) -> "View":
        """Return the array as another run holds it, without a buffer."""
        other = View(self.shape, self.itemsize)
        other.references = self.references
        other.copy_layout(self)
        return other

    def fresh(self) -> None:
        """Set the layout of a new array: row by row without gaps."""
        # Computed when asked for: most arrays are read in order, and nothing looks at the strides.
        self._strides = None
        self.data_size = self.size
        self.row = self.dense = True
        # An array with one axis longer than 1 is both (mlx array.cpp, array::set_data).
        self.column = _is_line(self.shape)

    @property
    def strides(self) -> Strides:
        """Elements from one index to the next, by axis."""
        if self._strides is None:
            self._strides = row_strides(self.shape)
        return self._strides

    @property
    def given_strides(self) -> Strides | None:
        """The strides, None where they are those of a new array."""
        return self._strides

    def set_layout(
        self, strides: Strides | None, data_size: int, *, row: bool, column: bool, dense: bool
    ) -> None:
        self._strides = strides
        self.data_size = data_size
        self.row = row
        self.column = column
        self.dense = dense

    def copy_layout(self, other: "View") -> None:
        """Take strides and flags of another array of the same shape."""
        self._strides = other._strides
        self.data_size = other.data_size
        self.row = other.row
        self.column = other.column
        self.dense = other.dense


def _is_line(shape: tuple[int, ...]) -> bool:
    """Whether at most one axis is longer than 1."""
    return shape.count(1) >= len(shape) - 1 or 0 in shape


def row_strides(shape: tuple[int, ...]) -> Strides:
    """Return the strides of a new array.

    >>> row_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def contiguity(shape: tuple[int, ...], strides: Strides) -> tuple[int, bool, bool]:
    """Return the elements of the axes that are not broadcast, and row and column contiguity.

    >>> contiguity((2, 3), (3, 1)), contiguity((3, 2), (1, 3))
    ((6, True, False), (6, False, True))
    """
    elements = forward = backward = 1
    row = column = True
    last = len(shape) - 1
    for axis, length in enumerate(shape):
        column = column and (strides[axis] == forward or length == 1)
        row = row and (strides[last - axis] == backward or shape[last - axis] == 1)
        forward *= length
        backward *= shape[last - axis]
        # A stride of 0 repeats an element that is there once.
        if strides[axis] > 0:
            elements *= length
    return elements, row, column


def broadcast(source: View, out: View) -> None:
    """Repeat axes of length one."""
    # New axes come first, as in NumPy.
    missing = len(out.shape) - len(source.shape)
    strides = (0,) * missing + tuple(
        0 if length == 1 else stride
        for length, stride in zip(source.shape, source.strides, strict=True)
    )
    # A repeated element leaves neither rows nor columns (common/broadcasting.cpp).
    same = out.size <= source.size
    out.set_layout(
        strides,
        source.data_size,
        row=same and source.row,
        column=same and source.column,
        dense=source.dense,
    )


def transpose(source: View, out: View, axes: tuple[int, ...]) -> None:
    # With broadcast axes the old flags hold (common/common.cpp, Transpose::eval).
    strides = tuple(source.strides[axis] for axis in axes)
    row, column = source.row, source.column
    if source.dense and source.data_size == source.size:
        _, row, column = contiguity(out.shape, strides)
    out.set_layout(strides, source.data_size, row=row, column=column, dense=source.dense)


def cut(source: View, out: View, steps: tuple[int, ...]) -> None:
    """Take a slice (common/slicing.cpp, shared_buffer_slice)."""
    as_strided(out, tuple(a * b for a, b in zip(source.strides, steps, strict=True)))


def as_strided(out: View, strides: Strides) -> None:
    """Set strides, with the flags and the reach that follow from them."""
    # Elements from the first to the last, with the gaps between them.
    reach = sum(abs(s) * (length - 1) for s, length in zip(strides, out.shape, strict=True)) + 1
    elements, row, column = contiguity(out.shape, strides)
    out.set_layout(strides, reach, row=row, column=column, dense=elements == reach)


def split(source: View, out: View) -> None:
    """Take one part of a split; its flags differ from a slice's."""
    # common/common.cpp, Split::eval: data_size is the elements of the part, without gaps.
    strides = source.strides
    size, row, column = contiguity(out.shape, strides)
    if size == 1:
        dense = True
    elif size == source.data_size:
        dense = source.dense
    else:
        dense = source.dense and (row or column)
    out.set_layout(strides, size, row=row, column=column, dense=dense)


def same_axes(source: View, out: View, strides: Strides) -> None:
    """Add or drop axes of length one."""
    out.copy_layout(source)
    out._strides = strides


def reshape(source: View, out: View) -> bool:
    """Give the source's layout another shape; False when that needs a copy.

    Source: common/utils.cpp, prepare_reshape.
    """
    # Rows without gaps: the new shape has its own strides and no copy.
    if source.row or not source.size:
        out.fresh()
        out.data_size = source.data_size
        return True
    if not source.shape:
        strides: Strides | None = (0,) * len(out.shape)
    else:
        strides = _reshaped(source, out.shape)
    if strides is None:
        return False
    same_axes(source, out, strides)
    return True


def _reshaped(source: View, shape: tuple[int, ...]) -> Strides | None:
    # Every new axis must divide a run of old axes that follow one another.
    lengths, steps = collapse(source.shape, source.strides)
    strides: list[int] = []
    axis = 0
    for length in shape:
        if axis < len(lengths) and lengths[axis] % length == 0:
            # What remains of the run is for the next axes.
            lengths[axis] //= length
            strides.append(lengths[axis] * steps[axis])
            axis += lengths[axis] == 1
        elif length == 1:
            strides.append(strides[-1])
        else:
            return None
    return tuple(strides)


def collapse(shape: tuple[int, ...], strides: Strides) -> tuple[list[int], list[int]]:
    """Join axes that follow one another without a gap (common/utils.cpp).

    >>> collapse((2, 3, 4), (12, 4, 1)), collapse((3, 2, 4), (4, 12, 1))
    (([24], [1]), ([3, 2, 4], [4, 12, 1]))
    """
    lengths, steps = [shape[0]], [strides[0]]
    for length, stride in zip(shape[1:], strides[1:], strict=True):
        # The stride of such an axis is never used.
        if length == 1:
            continue
        if stride * length == steps[-1]:
            lengths[-1] *= length
            steps[-1] = stride
        else:
            lengths.append(length)
            steps.append(stride)
    return lengths, steps
