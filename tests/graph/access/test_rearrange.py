import pytest

from lowtide.graph.access import Whole
from tests.graph.access.probe import Probe, aten, check, tensor

IMAGE = tensor(1, 2, 5, 4)


def test_turned():
    check(aten.flip.default, IMAGE, [0, -1])
    check(aten.roll.default, IMAGE, [2, -1], [2, 3])
    assert not Probe(aten.roll.default, (IMAGE, [2])).access.known


def test_pixels():
    check(aten.pixel_shuffle.default, tensor(2, 12, 3, 2), 2)
    check(aten.pixel_unshuffle.default, tensor(2, 3, 4, 6), 2)


@pytest.mark.parametrize("dim", [1, -1])
def test_gated(dim):
    given = tensor(2, 6, 4)
    check(aten.glu.default, given, dim)
    half = tensor(*aten.glu.default(given, dim).shape, seed=2)
    # An element far on the open side of the gate is let through whatever it is.
    relation = check(aten.glu_backward.default, half, given, dim, loose=[1])[0]
    assert relation.inputs[1][dim] == Whole()


@pytest.mark.parametrize(("size", "step"), [(3, 2), (2, 3), (4, 1)])
def test_unfold(size, step):
    check(aten.unfold.default, tensor(2, 9, 3), -2, size, step)
    given = tensor(2, 9, 3)
    check(aten.unfold.default, given, 1, size, step)
    out = aten.unfold.default(given, 1, size, step)
    check(aten.unfold_backward.default, tensor(*out.shape, seed=2), [2, 9, 3], 1, size, step, whole=False)
