import pytest

from lowtide.graph import Rect
from lowtide.graph.access import BlockIndex, Digit, Reshaped, Same, Spread, Whole, Window
from tests.graph.access.probe import Probe, aten, check, tensor

CASES = {
    "plain": ((2, 3, 7, 6), (4, 3, 3, 2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "one number": ((1, 2, 7, 6), (2, 2, 3, 3), [2], [1], [1], False, [0], 1),
    "stride": ((1, 2, 9, 8), (3, 2, 3, 3), [2, 3], [1, 2], [1, 1], False, [0, 0], 1),
    "stride over gaps": ((1, 1, 11, 8), (1, 1, 2, 1), [3, 2], [0, 1], [1, 1], False, [0, 0], 1),
    "dilation": ((1, 2, 9, 9), (2, 2, 3, 2), [1, 2], [2, 0], [2, 3], False, [0, 0], 1),
    "dilated stride": ((1, 1, 15, 13), (1, 1, 2, 3), [3, 2], [1, 0], [2, 3], False, [0, 0], 1),
    "groups": ((2, 4, 6, 5), (6, 2, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    "depthwise": ((1, 4, 6, 5), (4, 1, 3, 3), [2, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "1d": ((2, 2, 11), (3, 2, 4), [2], [3], [1], False, [0], 1),
    "3d": ((1, 2, 5, 4, 4), (2, 2, 2, 3, 2), [1, 2, 1], [1, 1, 0], [1, 1, 2], False, [0, 0, 0], 1),
    "transposed": ((1, 3, 4, 4), (3, 2, 3, 2), [2, 3], [1, 0], [1, 1], True, [1, 0], 1),
    "transposed dilated": ((1, 2, 4, 5), (2, 2, 2, 2), [3, 1], [1, 1], [2, 2], True, [0, 0], 1),
    "transposed groups": ((2, 4, 3, 4), (4, 3, 3, 3), [2, 1], [1, 1], [1, 1], True, [0, 0], 2),
}


def given(case):
    image, weight, *figures = CASES[case]
    transposed, groups = figures[3], figures[5]
    channels = weight[1] * groups if transposed else weight[0]
    return tensor(*image, seed=1), tensor(*weight, seed=2), tensor(channels, seed=3), figures


@pytest.mark.parametrize("case", CASES)
def test_forward(case):
    image, weight, bias, figures = given(case)
    # At a border the ends of the kernel, which is read whole, may meet nothing but padding.
    check(aten.convolution.default, image, weight, bias, *figures, whole=False)
    check(aten.convolution.default, image, weight, None, *figures, count=1, whole=False)


@pytest.mark.parametrize("case", CASES)
def test_backward(case):
    image, weight, bias, figures = given(case)
    out = aten.convolution.default(image, weight, bias, *figures)
    gradient = tensor(*out.shape, seed=4)
    bias_sizes = list(bias.shape)
    call = (gradient, image, weight, bias_sizes, *figures)
    check(aten.convolution_backward.default, *call, [True, False, True], count=4, whole=False)
    # Parts of a kernel may see nothing but padding at the border, so the ends of its sum need not matter.
    check(aten.convolution_backward.default, *call, [False, True, False], count=4, tight=False)
    if case != "stride over gaps":
        check(aten.convolution_backward.default, *call, [False, True, False], count=2, keep=(2, 3, 4))


@pytest.mark.parametrize("mask", [[False, True, False], [True, False, True], [False, True, True]])
def test_gradients_that_nobody_asked_for_are_left_out(mask):
    image, weight, _, figures = given("plain")
    gradient = tensor(2, 4, 5, 5, seed=4)
    relations = check(
        aten.convolution_backward.default, gradient, image, weight, [4], *figures, mask, count=1, whole=False
    )
    shapes = [(2, 3, 7, 6), (4, 3, 3, 2), (4,)]
    assert [r.shape for r in relations] == [s for s, asked in zip(shapes, mask, strict=True) if asked]


def test_padding_is_what_is_reached_beyond_the_image():
    image, weight = tensor(1, 1, 8, 8), tensor(1, 1, 3, 3)
    figures = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    relation = Probe(aten.convolution.default, (image, weight, None, *figures)).access.relations[0]
    top = Rect((0, 0, 0, 0), (1, 1, 2, 8))
    assert relation.reach(top)[0] == Rect((0, 0, -1, -1), (1, 1, 3, 9))
    assert relation.needs(top)[0] == Rect((0, 0, 0, 0), (1, 1, 3, 8))
    assert relation.inputs[0][2:] == (Window(2, 3, 1, 1, 1), Window(3, 3, 1, 1, 1))


@pytest.mark.parametrize(
    ("case", "forward", "back"),
    [
        ("plain", (Same(1), Same(4)), (Same(4), Same(1))),
        ("transposed", (Same(4), Same(1)), (Same(1), Same(4))),
        ("groups", (Same(1), Whole()), (BlockIndex(1, 2, 3), Reshaped((Digit(1, 1, 2),)))),
        ("transposed groups", (BlockIndex(1, 3, 2), Reshaped((Digit(1, 1, 3),))), (Same(1), Whole())),
    ],
)
def test_channels_of_the_weight(case, forward, back):
    image, weight, bias, figures = given(case)
    relation = Probe(aten.convolution.default, (image, weight, bias, *figures)).access.relations[0]
    assert relation.inputs[1] == (*forward, Whole(), Whole())
    assert relation.once == (2,)
    gradient = aten.convolution.default(image, weight, bias, *figures)
    call = (gradient, image, weight, list(bias.shape), *figures, [True, False, False])
    relation = Probe(aten.convolution_backward.default, call).access.relations[0]
    assert relation.inputs[1:] == (None, (*back, Whole(), Whole()))


def test_rows_that_a_stride_steps_over_have_no_gradient():
    assert Spread(0, kernel=1, stride=3).span([(1, 3)], 9) == (1, 1)
    assert Spread(0, kernel=1, stride=3).span([(1, 4)], 9) == (1, 2)


def test_a_weight_gradient_is_a_sum_over_batch_rows_and_columns():
    image, weight, _, figures = given("plain")
    gradient = tensor(2, 4, 5, 5, seed=4)
    call = (gradient, image, weight, [4], *figures, [True, True, True])
    _, filters, bias = Probe(aten.convolution_backward.default, call).access.relations
    assert filters.sums == bias.sums == (2, 5, 5)
    part = filters.needs(Rect.of_shape(filters.shape), Rect((1, 2, 0), (2, 3, 5)))
    assert part == (Rect((1, 0, 2, 0), (2, 4, 3, 5)), Rect((1, 0, 2, 0), (2, 3, 5, 6)), None)
