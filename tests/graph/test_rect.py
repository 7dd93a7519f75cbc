import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import GraphError
from lowtide.graph import Rect

bounds = st.integers(-4, 6)


@st.composite
def rects(draw, ndim=2):
    lo = tuple(draw(bounds) for _ in range(ndim))
    hi = tuple(draw(bounds) for _ in range(ndim))
    return Rect(lo, hi)


def points(rect):
    """The set of indices, counted out one by one."""
    return set(itertools.product(*(range(lo, hi) for lo, hi in rect)))


@given(rects(), rects())
def test_intersection_holds_what_both_hold(a, b):
    assert points(a.intersect(b)) == points(a) & points(b)


@given(rects(), rects())
def test_hull_is_the_smallest_box_around_both(a, b):
    both = points(a) | points(b)
    hull = a.hull(b)
    assert both <= points(hull)
    if both:
        for d in range(2):
            assert hull.lo[d] == min(p[d] for p in both)
            assert hull.hi[d] == max(p[d] for p in both) + 1


@given(rects())
def test_size_counts_the_elements(rect):
    assert rect.size == len(points(rect))
    assert rect.empty == (not points(rect))


@given(rects(), st.tuples(bounds, bounds))
def test_shift_moves_every_element(rect, by):
    assert points(rect.shift(by)) == {(i + by[0], j + by[1]) for i, j in points(rect)}


@given(rects(), rects())
def test_contains_is_subset(a, b):
    assert a.contains(b) == (points(b) <= points(a))


@given(rects(), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_grow_and_shrink_undo_each_other(rect, by):
    grown = rect.grow(by, by)
    assert grown.grow([-d for d in by], [-d for d in by]) == rect
    assert points(rect) <= points(grown)


@given(rects(), st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_clip_keeps_what_lies_inside_a_shape(rect, shape):
    inside = {p for p in points(rect) if all(0 <= i < n for i, n in zip(p, shape, strict=True))}
    assert points(rect.clip(shape)) == inside


@given(rects(), st.integers(0, 1), st.integers(1, 7))
def test_split_is_a_partition_into_nearly_equal_parts(rect, dim, parts):
    pieces = rect.split(dim, parts)
    assert sum(piece.size for piece in pieces) == rect.size
    assert set().union(*map(points, pieces)) == points(rect)
    lengths = [piece.shape[dim] for piece in pieces]
    assert max(lengths) - min(lengths) <= 1
    if rect.shape[dim]:
        assert all(lengths)
        assert len(pieces) == min(parts, rect.shape[dim])


def test_of_shape_and_slices_index_an_array():
    rect = Rect.of_shape((2, 3))
    assert rect == Rect((0, 0), (2, 3))
    assert Rect((1, 0), (2, 2)).slices() == (slice(1, 2), slice(0, 2))
    assert str(Rect((1, 0), (2, 2))) == "[1:2, 0:2]"


def test_a_scalar_has_one_element():
    assert Rect((), ()).size == 1
    assert not Rect((), ()).empty


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Rect((0,), (1, 2)),
        lambda: Rect((0,), (1,)).intersect(Rect((0, 0), (1, 1))),
        lambda: Rect((0,), (1,)).split(1, 2),
        lambda: Rect((0,), (1,)).split(0, 0),
        lambda: Rect((0,), (1,)).shift((1, 2)),
    ],
)
def test_ranks_that_do_not_fit_are_refused(wrong):
    with pytest.raises(GraphError):
        wrong()
