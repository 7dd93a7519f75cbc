import pytest

from tests.graph.access.probe import aten, check, tensor

MAX = {
    "plain": ((2, 2, 6, 8), [2, 2]),
    "no stride": ((1, 2, 6, 9), [2, 3], []),
    "overlap": ((1, 2, 9, 8), [3, 3], [2, 2], [1, 1]),
    "dilation": ((1, 1, 9, 10), [2, 3], [2, 1], [1, 0], [2, 2]),
    "ceil": ((1, 2, 8, 9), [3, 2], [3, 2], [1, 0], [1, 1], True),
    "gaps": ((1, 1, 9, 9), [2, 1], [3, 2]),
    "without a batch": ((2, 6, 6), [2], [2]),
}
AVERAGE = {
    "plain": ((2, 2, 6, 8), [2, 2]),
    "overlap": ((1, 2, 9, 8), [3, 3], [2, 1], [1, 1]),
    "ceil": ((1, 2, 8, 9), [3, 2], [3, 2], [1, 1], True),
    "padding not counted": ((1, 1, 8, 8), [3, 3], [1, 2], [1, 1], False, False),
    "divisor": ((1, 1, 8, 8), [3, 3], [2, 2], [0, 0], False, True, 5),
}
DEFAULTS = [[], [0, 0], [1, 1], False]


@pytest.mark.parametrize("case", MAX)
def test_max_forward(case):
    shape, *figures = MAX[case]
    values, places = check(aten.max_pool2d_with_indices.default, tensor(*shape), *figures)
    assert values == places


@pytest.mark.parametrize("case", MAX)
def test_max_backward(case):
    shape, kernel, *figures = MAX[case]
    image = tensor(*shape)
    figures = [kernel, *figures, *DEFAULTS[len(figures) :]]
    out, places = aten.max_pool2d_with_indices.default(image, *figures)
    gradient = tensor(*out.shape, seed=3)

    def other():
        return aten.max_pool2d_with_indices.default(tensor(*shape, seed=9), *figures)[1]

    call = (gradient, image, *figures, places)
    # A gradient reaches the maximum of its window alone, which need not be in the part that is looked at.
    relation = check(aten.max_pool2d_with_indices_backward.default, *call, tight=False, valid={2: other})[0]
    assert relation.inputs[1] is None


@pytest.mark.parametrize("case", AVERAGE)
def test_average(case):
    shape, *figures = AVERAGE[case]
    image = tensor(*shape)
    check(aten.avg_pool2d.default, image, *figures)
    gradient = tensor(*aten.avg_pool2d.default(image, *figures).shape, seed=3)
    defaults = [[2, 2], [], [0, 0], False, True, None]
    check(aten.avg_pool2d_backward.default, gradient, image, *figures, *defaults[len(figures) :])


def test_one_and_three_dimensions():
    check(aten.avg_pool1d.default, tensor(2, 3, 9), [3], [2], [1])
    line = tensor(1, 1, 9, 4, 3)
    check(aten.avg_pool3d.default, line, [5, 1, 1], [1, 1, 1])
    check(
        aten.avg_pool3d_backward.default,
        tensor(1, 1, 5, 4, 3),
        line,
        [5, 1, 1],
        [1, 1, 1],
        [0, 0, 0],
        False,
        True,
        None,
    )
    figures = ([2, 2, 2], [2, 1, 1], [0, 1, 0], [1, 1, 1], False)
    check(aten.max_pool3d_with_indices.default, line, *figures)
    out, places = aten.max_pool3d_with_indices.default(line, *figures)
    other = aten.max_pool3d_with_indices.default(-line, *figures)[1]
    backward = aten.max_pool3d_with_indices_backward.default
    check(backward, out, line, *figures, places, tight=False, valid={2: lambda: other})


@pytest.mark.parametrize("size", [[1, 1], [3, 2], [4, 7], [7, 9]])
def test_adaptive(size):
    image = tensor(2, 2, 7, 9)
    gradient = tensor(2, 2, *size, seed=3)
    check(aten._adaptive_avg_pool2d.default, image, size)
    check(aten._adaptive_avg_pool2d_backward.default, gradient, image)
    check(aten.adaptive_max_pool2d.default, image, size)
    _, places = aten.adaptive_max_pool2d.default(image, size)
    other = aten.adaptive_max_pool2d.default(-image, size)[1]
    backward = aten.adaptive_max_pool2d_backward.default
    check(backward, gradient, image, places, tight=False, valid={2: lambda: other})


def test_adaptive_in_three_dimensions():
    image = tensor(1, 1, 4, 5, 6)
    check(aten._adaptive_avg_pool3d.default, image, [2, 3, 4])
    check(aten._adaptive_avg_pool3d_backward.default, tensor(1, 1, 2, 3, 4), image)
