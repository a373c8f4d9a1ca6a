"""Layouts of arrays in their buffers, compared with MLX's definition of contiguity."""

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.trace import layouts
from memfit.estimators.trace.layouts import View

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def places(view: View) -> list[int]:
    """Return the position of each element, in the order of its indices."""
    indices = product(*map(range, view.shape))
    return [sum(i * s for i, s in zip(index, view.strides, strict=True)) for index in indices]


@st.composite
def transposed(draw: st.DrawFn) -> View:
    """A new array seen with its axes in another order."""
    shape = draw(SHAPES)
    axes = tuple(draw(st.permutations(range(len(shape)))))
    out = View(tuple(shape[axis] for axis in axes), 2)
    layouts.transpose(View(shape, 2), out, axes)
    return out


@given(transposed())
def test_row_contiguous_means_elements_in_sequence(view: View) -> None:
    assert view.row == (places(view) == list(range(view.size)))


@given(transposed(), st.data())
def test_a_reshape_without_a_copy_keeps_every_element_in_place(
    view: View, data: st.DataObject
) -> None:
    out = View(data.draw(st.sampled_from(_shapes_of(view.size))), 2)
    if layouts.reshape(view, out):
        assert places(out) == places(view)


@given(transposed())
def test_a_view_of_all_elements_spans_exactly_their_count(view: View) -> None:
    out = View(view.shape, 2)
    layouts.cut(view, out, (1,) * len(view.shape))
    assert out.dense
    assert out.data_size == view.size


def test_a_slice_of_rows_is_dense_and_one_of_columns_is_not() -> None:
    matrix = View((4, 6), 2)
    rows, columns = View((2, 6), 2), View((4, 3), 2)
    layouts.cut(matrix, rows, (1, 1))
    layouts.cut(matrix, columns, (1, 1))
    assert (rows.dense, rows.row, rows.data_size) == (True, True, 12)
    assert (columns.dense, columns.row, columns.data_size) == (False, False, 21)


def test_heads_moved_before_tokens_cannot_be_merged_without_a_copy() -> None:
    heads = View((1, 8, 5, 16), 2)
    layouts.transpose(View((1, 5, 8, 16), 2), heads, (0, 2, 1, 3))
    assert not layouts.reshape(heads, View((1, 8, 80), 2))
    back = View((1, 5, 8, 16), 2)
    layouts.transpose(heads, back, (0, 2, 1, 3))
    assert layouts.reshape(back, View((1, 5, 128), 2))


def test_a_broadcast_shares_the_elements_of_its_source() -> None:
    out = View((3, 4), 2)
    layouts.broadcast(View((1, 4), 2), out)
    assert (out.strides, out.data_size, out.row) == ((0, 1), 4, False)


def _shapes_of(size: int) -> list[tuple[int, ...]]:
    return [
        (a, b, size // a // b)
        for a, b in product(range(1, size + 1), repeat=2)
        if size % (a * b) == 0 and prod((a, b)) <= size
    ]
