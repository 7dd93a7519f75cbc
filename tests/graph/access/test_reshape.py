import pytest
import torch

from lowtide.graph.access import Digit, Reshaped, Same, Whole
from lowtide.graph.access.reshape import reshaped
from tests.graph.access.probe import aten, check, tensor

SHAPES = [
    ((2, 3, 4), (6, 4)),
    ((2, 3, 4), (24,)),
    ((24,), (2, 3, 4)),
    ((6, 4), (2, 12)),
    ((6, 4), (2, 3, 2, 2)),
    ((4, 6), (2, 2, 3, 2)),
    ((2, 1, 6), (2, 6)),
    ((2, 6), (1, 2, 1, 6, 1)),
    ((2, 4, 3, 5), (8, 15)),
    ((8, 15), (2, 4, 3, 5)),
    ((2, 6, 10), (2, 3, 4, 5)),
    ((2, 6, 5), (4, 15)),
    ((4, 3), (2, 6)),
    ((2, 6), (4, 3)),
    ((1, 1), ()),
    ((), (1,)),
]


@pytest.mark.parametrize(("source", "shape"), SHAPES)
def test_view(source, shape):
    check(aten.view.default, tensor(*source), list(shape), count=12)


@pytest.mark.parametrize(("source", "shape"), [((2, 3), (3, 2)), ((5, 4, 6), (5, 6, 4)), ((4, 9), (6, 6))])
def test_without_common_factors(source, shape):
    relation = check(aten.view.default, tensor(*source), list(shape), whole=False)[0]
    assert relation.inputs[0][-2:] == (Whole(), Whole())
    assert relation.inputs[0][:-2] == tuple(Same(d) for d in range(len(source) - 2))


def test_what_the_indices_are():
    assert reshaped((8, 1024), (8192,)) == (
        Reshaped((Digit(0, 1024, 8),)),
        Reshaped((Digit(0, 1, 1024),)),
    )
    assert reshaped((8192,), (8, 1024)) == (Reshaped((Digit(0, 1, 8, 1024), Digit(1, 1, 1024))),)
    assert reshaped((2, 64, 24, 24), (2, 1, 64, 24, 24)) == (Same(0), Same(2), Same(3), Same(4))
    assert reshaped((3, 0), (0, 7)) == (Whole(), Whole())


def test_ones_added_and_taken_away():
    check(aten.unsqueeze.default, tensor(2, 3), 1)
    check(aten.squeeze.dim, tensor(2, 1, 3), 1)
    check(aten.squeeze.dims, tensor(1, 2, 1, 3), [0, 2])
    check(aten.squeeze.default, tensor(1, 2, 1, 3))
    check(aten._unsafe_view.default, tensor(2, 3, 4), [2, 12])


def test_elements_of_another_type():
    check(aten.view.dtype, tensor(2, 3), torch.int64)
