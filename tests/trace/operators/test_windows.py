import pytest
import torch
from torch import fx

from lowtide.errors import CaptureError
from lowtide.graph import Rect
from lowtide.trace.operators import InputPart, emit, supported
from tests.trace.operators.tiles import check, close, randn, single, tile

aten = torch.ops.aten


def picks(rng, *choices):
    return tuple(rng.choice(one) for one in choices)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolution(rng, rank):
    for _ in range(6):
        groups, bias = picks(rng, (1, 1, 2, 3), (True, False))
        kernel = [rng.randint(1, 4 if rank < 3 else 2) for _ in range(rank)]
        stride, dilation = ([rng.randint(1, 3) for _ in range(rank)] for _ in range(2))
        padding = [rng.randint(0, 4) for _ in range(rank)]
        size = [max(rng.randint(1, 14), d * (k - 1) + 1) for k, d in zip(kernel, dilation, strict=True)]
        x = randn(rng.randint(1, 3), 2 * groups, *size)
        weight = randn(3 * groups, 2, *kernel)
        args = (stride, padding, dilation, False, [0] * rank, groups)
        check(rng, aten.convolution.default, x, weight, randn(3 * groups) if bias else None, *args)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolution(rng, rank):
    for _ in range(6):
        groups, bias = picks(rng, (1, 1, 2, 3), (True, False))
        kernel = [rng.randint(1, 4 if rank < 3 else 2) for _ in range(rank)]
        stride, dilation = ([rng.randint(1, 3) for _ in range(rank)] for _ in range(2))
        padding = [rng.randint(0, d * (k - 1) // 2 + 1) for k, d in zip(kernel, dilation, strict=True)]
        extra = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        x = randn(rng.randint(1, 3), 2 * groups, *[rng.randint(3, 6) for _ in range(rank)])
        weight = randn(2 * groups, 3, *kernel)
        args = (stride, padding, dilation, True, extra, groups)
        check(rng, aten.convolution.default, x, weight, randn(3 * groups) if bias else None, *args)


def test_a_convolution_pads_at_the_edges_of_the_image_alone():
    x, weight = randn(1, 1, 12, 12), randn(1, 1, 3, 3)
    one = single(aten.convolution.default, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def written(wanted):
        target = fx.Graph()
        box = Rect((0, 0, max(0, wanted[0] - 1), 0), (1, 1, min(12, wanted[1] + 1), 12))
        parts = [
            InputPart(target.placeholder("x"), box),
            InputPart(target.placeholder("w"), Rect.of_shape((1, 1, 3, 3))),
        ]
        emit(target, one.call, one.op, one.graph, parts, Rect((0, 0, wanted[0], 0), (1, 1, wanted[1], 12)))
        calls = [n for n in target.nodes if n.op == "call_function"]
        return [n.target for n in calls[:-1]], calls[-1].args[4]

    assert written((0, 12)) == ([], [1, 1])
    assert written((4, 8)) == ([], [0, 1])
    assert written((0, 6)) == ([aten.constant_pad_nd.default], [0, 1])


@pytest.mark.parametrize("rank", [2, 3])
def test_max_pool(rng, rank):
    target = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}[rank]
    for _ in range(6):
        kernel = [rng.randint(1, 4) for _ in range(rank)]
        dilation = [rng.randint(1, 2) for _ in range(rank)]
        padding = [rng.randint(0, k // 2) for k in kernel]
        stride = rng.choice(([], [rng.randint(1, 3) for _ in range(rank)]))
        size = [rng.randint(d * (k - 1) + 1, 12) for k, d in zip(kernel, dilation, strict=True)]
        x = randn(*rng.choice(((2, 3), (3,))), *size) - 5
        check(rng, target, x, kernel, stride, padding, dilation, rng.random() < 0.5)


@pytest.mark.parametrize("rank", [2, 3])
def test_average_pool(rng, rank):
    target = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}[rank]
    for _ in range(8):
        kernel = [rng.randint(1, 4) for _ in range(rank)]
        padding = [rng.randint(0, k // 2) for k in kernel]
        stride = rng.choice(([], [rng.randint(1, 3) for _ in range(rank)]))
        x = randn(*rng.choice(((2, 3), (3,))), *[rng.randint(k, 12) for k in kernel])
        ceil, include = rng.random() < 0.5, rng.random() < 0.5
        check(rng, target, x, kernel, stride, padding, ceil, include, rng.choice((None, None, 7)))


def test_adaptive_pools(rng):
    for target in (aten._adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default):
        check(rng, target, randn(2, 3, 12, 10), [4, 5])
        check(rng, target, randn(2, 3, 13, 7), [5, 7])
        check(rng, target, randn(2, 3, 5, 7), [7, 3])
    check(rng, aten._adaptive_avg_pool3d.default, randn(2, 3, 6, 7, 5), [3, 4, 1])


UPSAMPLING = [
    (aten.upsample_nearest1d.default, (6,), (12,), ()),
    (aten.upsample_nearest2d.default, (5, 6), (15, 12), ()),
    (aten.upsample_nearest2d.default, (5, 6), (10, 12), (2.0, 2.0)),
    (aten._upsample_nearest_exact2d.default, (5, 6), (15, 12), ()),
    (aten.upsample_nearest3d.default, (3, 4, 2), (6, 4, 4), ()),
    (aten.upsample_linear1d.default, (7,), (21,), (False,)),
    (aten.upsample_bilinear2d.default, (5, 6), (10, 24), (False,)),
    (aten.upsample_trilinear3d.default, (3, 4, 2), (6, 4, 4), (False,)),
    (aten.upsample_bicubic2d.default, (6, 7), (12, 21), (False,)),
]


@pytest.mark.parametrize(("target", "size", "larger", "more"), UPSAMPLING)
def test_upsampling(rng, target, size, larger, more):
    check(rng, target, randn(2, 3, *size), list(larger), *more)


@pytest.mark.parametrize(
    ("target", "size", "made", "more"),
    [
        (aten.upsample_nearest2d.default, (15, 9), (11, 20), ()),
        (aten.upsample_nearest2d.default, (15, 9), (4, 9), ()),
        (aten.upsample_nearest2d.default, (7, 9), (11, 15), (1.7, 1.7)),
        (aten._upsample_nearest_exact2d.default, (16, 9), (3, 5), ()),
        (aten.upsample_bilinear2d.default, (16, 9), (3, 5), (False,)),
        (aten.upsample_bicubic2d.default, (23, 9), (3, 14), (False,)),
    ],
)
def test_the_last_rows_of_an_image_that_nothing_is_made_of(target, size, made, more):
    """They are not there, and what is made is made of the others as of the whole image."""
    one = single(target, randn(4, 2, *size), list(made), *more)
    for wanted in (Rect((0, 0, 0, 0), (4, 1, *made)), Rect((1, 0, 0, 0), (3, 2, *made))):
        assert supported(one.op, one.graph, wanted) is None
        close(tile(one, wanted), one.outputs[0][wanted.slices()])


@pytest.mark.parametrize("more", [((7, 9), False), ((10, 12), True)])
def test_upsampling_by_fractions_is_for_whole_images(rng, more):
    one = single(aten.upsample_bilinear2d.default, randn(4, 2, 5, 6), list(more[0]), more[1])
    for lo, hi in ((0, 1), (1, 4)):
        wanted = Rect((lo, 0, 0, 0), (hi, 2, *more[0]))
        assert supported(one.op, one.graph, wanted) is None
        close(tile(one, wanted), one.outputs[0][lo:hi])
    part = Rect((0, 0, 0, 0), (4, 2, 3, more[0][1]))
    assert "dimension 2" in supported(one.op, one.graph, part)
    with pytest.raises(CaptureError, match="cannot be run on parts: dimension 2"):
        tile(one, part)
