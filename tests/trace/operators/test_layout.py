import pytest
import torch

from lowtide.graph import Rect
from tests.trace.operators.tiles import check, randn, single, tile

aten = torch.ops.aten


VIEWS = [
    ((4, 6, 5), (24, 5)),
    ((24, 5), (4, 6, 5)),
    ((4, 6, 5), (2, 12, 5)),
    ((4, 6), (3, 8)),
    ((2, 3, 4, 4), (2, 48)),
    ((2, 48), (2, 3, 4, 4)),
    ((2, 3, 8), (2, 1, 3, 4, 2)),
    ((5,), (1, 5, 1)),
    ((6, 1, 4), (6, 4)),
    ((4, 1, 1, 1, 3, 3, 2, 2), (4, 1, 9, 4)),
    ((6, 10), (4, 15)),
]


@pytest.mark.parametrize(("given", "wanted"), VIEWS)
def test_views(rng, given, wanted):
    for _ in range(4):
        check(rng, rng.choice((aten.view.default, aten._unsafe_view.default)), randn(*given), list(wanted))
    check(rng, aten.reshape.default, randn(*given[::-1]).permute(*range(len(given))[::-1]), list(wanted))
    check(rng, aten.view.default, torch.arange(randn(*given).numel()).reshape(given) > 3, list(wanted))


def test_other_layouts(rng):
    x = randn(3, 4, 5)
    check(rng, aten.squeeze.dim, randn(3, 1, 4), 1)
    check(rng, aten.squeeze.dim, randn(3, 2, 4), 1)
    check(rng, aten.squeeze.dims, randn(1, 2, 1), [0, 2])
    check(rng, aten.squeeze.default, randn(1, 2, 3))
    check(rng, aten.unsqueeze.default, x, -1)
    check(rng, aten.permute.default, x, [2, 0, -2])
    check(rng, aten.transpose.int, x, -1, 0)
    check(rng, aten.t.default, randn(3, 4))
    check(rng, aten.expand.default, randn(3, 1, 4), [2, -1, 5, 4])
    check(rng, aten.flip.default, x, [0, -1])
    check(rng, aten.unbind.int, x, 1, output=2)
    check(rng, aten.select.int, x, -1, -2)
    check(rng, aten.split.Tensor, randn(7, 4), 3, output=rng.randrange(3))
    check(rng, aten.split_with_sizes.default, randn(3, 7), [2, 4, 1], -1, output=rng.randrange(3))


def test_crops(rng):
    x = randn(3, 17, 6)
    check(rng, aten.slice.Tensor, x, 1, 3, -2)
    check(rng, aten.slice.Tensor, x, -2, -9, 1 << 60)
    check(rng, aten.slice.Tensor, x, 1, 2, 16, 3)
    check(rng, aten.slice.Tensor, x)


def test_constant_padding(rng):
    check(rng, aten.constant_pad_nd.default, randn(3, 4, 5), [2, 1, 0, 3], 1.5)
    check(rng, aten.constant_pad_nd.default, randn(3, 4, 5), [-1, 2, 1, -2, 6, 6], 0.0)
    check(rng, aten.constant_pad_nd.default, randn(2, 1, 6, 3, 3), [0, 0, 0, 0, 2, 2])


def test_joins(rng):
    x, y, z = randn(3, 4), randn(2, 4), randn(5, 4)
    check(rng, aten.cat.default, [x, y, z])
    check(rng, aten.cat.default, [x, torch.zeros(0, dtype=torch.float64), x])
    check(rng, aten.cat.default, [randn(3, 4, 2), randn(3, 1, 2)], 1)
    check(rng, aten.stack.default, [randn(3, 4), randn(3, 4), randn(3, 4)], rng.randint(-3, 2))


def test_elements_put_elsewhere(rng):
    check(rng, aten.repeat.default, randn(3, 4), [2, 3, 2])
    check(rng, aten.repeat.default, randn(1, 4), [5, 1])
    check(rng, aten.roll.default, randn(5, 4, 7), [2, -3], [0, -1])
    check(rng, aten.pixel_shuffle.default, randn(2, 12, 3, 2), 2)
    check(rng, aten.pixel_unshuffle.default, randn(2, 3, 6, 4), 2)
    check(rng, aten.unfold.default, randn(3, 11), 1, rng.randint(1, 4), rng.randint(1, 3))
    check(rng, aten.log_sigmoid_forward.default, randn(3, 4))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_borders_from_the_inside(rng, rank):
    for name in ("reflection", "replication"):
        target = getattr(aten, f"{name}_pad{rank}d").default
        for _ in range(3):
            size = [rng.randint(3, 6) for _ in range(rank)]
            padding = [rng.randint(0, n - 1) for n in size[::-1] for _ in range(2)]
            check(rng, target, randn(2, 2, *size), padding)


def test_overwriting(rng):
    check(rng, aten.slice_scatter.default, randn(3, 7), randn(3, 4), 1, 2, 6)
    check(rng, aten.slice_scatter.default, randn(7, 3), randn(7, 3))
    check(rng, aten.slice_scatter.default, randn(7, 3), randn(2, 3), 0, -2)
    check(rng, aten.select_scatter.default, randn(3, 7, 2), randn(3, 2), 1, rng.randrange(7))


def test_places_that_tensors_say(rng):
    x, rows, columns = randn(5, 6, 4), torch.randint(5, (3, 1)), torch.randint(6, (7,))
    check(rng, aten.index.Tensor, x, [rows])
    check(rng, aten.index.Tensor, x, [rows, columns])
    check(rng, aten.index.Tensor, x, [None, columns])
    check(rng, aten.index.Tensor, x, [columns.clamp(max=4), None, torch.randint(4, (7,))])


def test_tensors_out_of_nothing(rng):
    x = randn(2, 3)
    for args in ((aten.full.default, [3, 4], 2.5), (aten.zeros.default, [3]), (aten.ones.default, [4, 2])):
        check(rng, *args, dtype=torch.float64)
    check(rng, aten.new_zeros.default, x, [81, 3], pin_memory=False)
    check(rng, aten.new_full.default, x, [4], 3)
    check(rng, aten.full_like.default, x, 7)
    check(rng, aten.fill.Scalar, x, 7, grad=0)
    check(rng, aten.fill.Tensor, torch.zeros(2, 3), randn(), grad=0)
    check(rng, aten.zero.default, randn(2, 3), grad=0)
    check(rng, aten.tril_indices.default, 4, 4)
    check(rng, aten.arange.default, 16)
    check(rng, aten.arange.start, 3, 16)
    check(rng, aten.arange.start_step, 3, 17, 4)
    check(rng, aten.arange.start_step, 0.1, 3.0, 0.3, dtype=torch.float64)
    check(rng, aten.linspace.default, 0, 1, 11, dtype=torch.float64)
    check(rng, aten.eye.default, 6)
    check(rng, aten.scalar_tensor.default, 2.0)
    for diagonal in (-2, 0, 1):
        check(rng, aten.tril.default, randn(2, 6, 7), diagonal)
        check(rng, aten.triu.default, randn(6, 5), diagonal)
    one = single(aten.empty_like.default, x)
    assert tile(one, Rect((0, 1), (2, 2))).shape == (2, 1)
