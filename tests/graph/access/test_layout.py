import pytest

from lowtide.graph import Rect
from lowtide.graph.access import Either, Same, Shift
from tests.graph.access.probe import Probe, aten, check, tensor

GIVEN = tensor(3, 7, 5)
SLICES = [(1, 2, 6), (2, 1, -1), (-2, -5, None), (1, 1, 7, 3), (1, None, None, 2), (0, 0, 100), (1, 5, 3)]


@pytest.mark.parametrize("cut", SLICES)
def test_slice(cut):
    check(aten.slice.Tensor, GIVEN, *cut)
    part = aten.slice.Tensor(GIVEN, *cut)
    dim, start, end, *step = cut
    step = step[0] if step else 1
    start, end = (0 if start is None else start), (9**9 if end is None else end)
    gradient = tensor(*part.shape, seed=2)
    check(aten.slice_backward.default, gradient, [3, 7, 5], dim, start, end, step)
    check(aten.slice_scatter.default, GIVEN, gradient, dim, start, end, step, loose=[0])


def test_narrow():
    check(aten.narrow.default, GIVEN, 1, 2, 3)


@pytest.mark.parametrize(("dim", "at"), [(0, 1), (1, -1), (-1, 3)])
def test_select(dim, at):
    check(aten.select.int, GIVEN, dim, at)
    part = aten.select.int(GIVEN, dim, at)
    gradient = tensor(*part.shape, seed=2)
    check(aten.select_backward.default, gradient, [3, 7, 5], dim, at)
    check(aten.select_scatter.default, GIVEN, gradient, dim, at, loose=[0])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts(dim):
    check(aten.unbind.int, GIVEN, dim)
    check(aten.split.Tensor, GIVEN, 2, dim)
    length = GIVEN.shape[dim]
    check(aten.split_with_sizes.default, GIVEN, [1, length - 2, 1], dim)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_joins(dim):
    shapes = [[3, 4, 2] for _ in range(3)]
    for k, shape in enumerate(shapes):
        shape[dim] = k + 1
    check(aten.cat.default, [tensor(*shape, seed=k) for k, shape in enumerate(shapes)], dim)
    check(aten.stack.default, [tensor(3, 4, seed=k) for k in range(3)], dim)


def test_an_input_that_is_not_in_the_part_is_not_needed():
    relation = check(aten.cat.default, [GIVEN, tensor(3, 2, 5, seed=2)], 1)[0]
    assert relation.needs(Rect((0, 7, 0), (3, 9, 5)))[0].empty
    assert relation.needs(Rect((0, 1, 0), (1, 3, 5))) == (
        Rect((0, 1, 0), (1, 3, 5)),
        Rect((0,) * 3, (0,) * 3),
    )
    relation = check(aten.stack.default, [GIVEN, tensor(3, 7, 5, seed=2)], 1)[0]
    first, second = relation.needs(Rect((0, 1, 0, 0), (3, 2, 7, 5)))
    assert first.empty
    assert second == Rect.of_shape((3, 7, 5))


def test_the_same_tensor_twice():
    relation = check(aten.cat.default, [GIVEN, GIVEN], 2)[0]
    assert relation.inputs[0][2] == Either(Shift(2, 0), Shift(2, -5))
    assert relation.needs(Rect((0, 0, 3), (1, 1, 5))) == (Rect((0, 0, 3), (1, 1, 5)),)
    assert relation.needs(Rect((0, 0, 6), (1, 1, 7))) == (Rect((0, 0, 1), (1, 1, 2)),)
    square = tensor(4, 4)
    relation = check(aten.mm.default, square, square, tight=False, summed=False)[0]
    assert relation.needs(Rect((0, 2), (1, 3))) == (Rect((0, 0), (4, 4)),)


@pytest.mark.parametrize("margins", [[1, 2], [0, 3, 2, 0], [-1, 2], [0, 0, -2, -1, 1, 1]])
def test_pad(margins):
    relation = check(aten.constant_pad_nd.default, GIVEN, margins)[0]
    whole = Rect.of_shape(relation.shape)
    reach, lead = relation.reach(whole)[0], 3 - len(margins) // 2
    before = [0] * lead + margins[::2][::-1]
    assert [-lo for lo in reach.lo] == before


def test_orders():
    check(aten.permute.default, GIVEN, [2, 0, 1])
    check(aten.permute.default, GIVEN, [-1, 1, 0])
    check(aten.transpose.int, GIVEN, 0, -1)
    check(aten.t.default, tensor(3, 4))
    check(aten.t.default, tensor(3))


def test_repeats():
    relation = check(aten.expand.default, tensor(3, 1, 5), [2, 3, 4, 5])[0]
    assert relation.needs(Rect((1, 1, 2, 0), (2, 2, 4, 5))) == (Rect((1, 0, 0), (2, 1, 5)),)
    assert relation.inputs[0][0] == Same(1)
    check(aten.expand.default, tensor(), [2, 3])
    check(aten.repeat.default, tensor(3, 4), [2, 1, 3])


def test_complex_numbers():
    pairs = tensor(3, 4, 2)
    check(aten.view_as_complex.default, pairs, tight=False)
    check(aten.view_as_real.default, aten.view_as_complex.default(pairs).clone(), tight=False)


def test_an_empty_part_needs_nothing():
    relation = Probe(aten.permute.default, (GIVEN, [2, 0, 1])).access.relations[0]
    assert relation.needs(Rect((2, 0, 0), (2, 3, 7))) == (Rect((0, 0, 0), (0, 0, 0)),)
