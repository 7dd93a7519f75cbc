import pytest

from lowtide.graph import Rect
from tests.graph.access.probe import Probe, aten, check, tensor

IMAGE = tensor(1, 2, 5, 4)
SIZES = [[5, 4], [10, 8], [7, 9], [3, 2], [13, 3]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("exact", [False, True])
def test_nearest(size, exact):
    forward = aten._upsample_nearest_exact2d if exact else aten.upsample_nearest2d
    backward = aten._upsample_nearest_exact2d_backward if exact else aten.upsample_nearest2d_backward
    check(forward.default, IMAGE, size)
    check(backward.default, tensor(1, 2, *size, seed=2), size, [1, 2, 5, 4])


def test_factors_in_place_of_a_size():
    check(aten.upsample_nearest2d.vec, IMAGE, None, [2.0, 1.7])
    check(aten.upsample_nearest2d.default, IMAGE, [11, 6], 2.3, 1.7)
    check(aten.upsample_bilinear2d.vec, IMAGE, None, False, [2.0, 1.7], loose=[0])
    gradient = tensor(1, 2, 11, 6, seed=2)
    check(aten.upsample_nearest2d_backward.default, gradient, [11, 6], [1, 2, 5, 4], 2.3, 1.7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("corners", [False, True])
def test_between_elements(size, corners):
    gradient = tensor(1, 2, *size, seed=2)
    # Where a place falls on an element, its neighbours are read and count nothing.
    for forward, backward in (
        (aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward),
        (aten.upsample_bicubic2d, aten.upsample_bicubic2d_backward),
    ):
        check(forward.default, IMAGE, size, corners, tight=False)
        check(backward.default, gradient, size, [1, 2, 5, 4], corners, tight=False)


def test_an_element_between_others_reads_its_neighbours_alone():
    image = tensor(1, 1, 8, 8)
    call = (image, [16, 16], False)
    linear = Probe(aten.upsample_bilinear2d.default, call).access.relations[0]
    cubic = Probe(aten.upsample_bicubic2d.default, call).access.relations[0]
    part = Rect((0, 0, 5, 8), (1, 1, 6, 10))
    assert linear.needs(part)[0] == Rect((0, 0, 2, 3), (1, 1, 4, 6))
    assert cubic.needs(part)[0] == Rect((0, 0, 1, 2), (1, 1, 5, 7))


def test_other_ranks():
    check(aten.upsample_nearest1d.default, tensor(1, 2, 5), [8])
    check(aten.upsample_nearest3d.default, tensor(1, 1, 2, 3, 4), [4, 5, 6])
    check(aten.upsample_linear1d.default, tensor(1, 2, 5), [8], False, tight=False)
    check(aten.upsample_trilinear3d.default, tensor(1, 1, 2, 3, 4), [4, 5, 6], False, tight=False)


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize("margins", [[1, 2, 3, 0], [0, 3, 1, 4], [2, 2, 2, 2]])
def test_borders(kind, margins):
    forward, backward = (getattr(aten, f"{kind}_pad2d{suffix}").default for suffix in ("", "_backward"))
    check(forward, IMAGE, margins)
    out = forward(IMAGE, margins)
    check(backward, tensor(*out.shape, seed=2), IMAGE, margins)


def test_borders_of_other_ranks():
    check(aten.reflection_pad1d.default, tensor(2, 6), [3, 2])
    check(aten.replication_pad3d.default, tensor(1, 2, 3, 2), [1, 1, 0, 2, 1, 0])
