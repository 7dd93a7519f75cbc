import random

import pytest
import torch
from torch import fx

from lowtide.capture.local import Part, emit, loss_total, supported
from lowtide.errors import CaptureError, GraphError
from lowtide.graph import Rect
from tests.capture.tiles import adds_up, check, close, run, single, tile

aten = torch.ops.aten


@pytest.fixture(params=range(3))
def rng(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


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
            Part(target.placeholder("x"), box),
            Part(target.placeholder("w"), Rect.of_shape((1, 1, 3, 3))),
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


def test_pointwise_and_broadcasting(rng):
    x, y = randn(3, 1, 5), randn(4, 5)
    check(rng, aten.add.Tensor, x, y, alpha=2)
    check(rng, aten.mul.Tensor, x, x)
    check(rng, aten.mul.Tensor, randn(1), randn(3, 4))
    check(rng, aten.mul.Tensor, randn(3, 4), randn())
    check(rng, aten.div.Scalar, x, 0.7)
    check(rng, aten.pow.Tensor_Scalar, randn(3, 4, 5).abs() + 1, 0.75)
    check(rng, aten.relu.default, randn(3, 4))
    check(rng, aten.gelu.default, randn(3, 4), approximate="tanh")
    check(rng, aten.where.self, randn(3, 1) > 0, x, randn())
    check(rng, aten.masked_fill.Scalar, y, y > 0, -1.5)
    check(rng, aten._to_copy.default, randn(3, 4), dtype=torch.float32)
    check(rng, aten.clone.default, randn(3, 4).t(), memory_format=torch.contiguous_format)
    check(rng, aten.copy.default, torch.zeros(3, 4, dtype=torch.float32), randn(4), grad=0)


def test_matrix_products(rng):
    m, k, n = (rng.randint(1, 6) for _ in range(3))
    check(rng, aten.mm.default, randn(m, k), randn(k, n))
    check(rng, aten.addmm.default, randn(n), randn(m, k), randn(k, n), beta=0.5, alpha=2)
    check(rng, aten.addmm.default, randn(m, 1), randn(m, k), randn(k, n))
    check(rng, aten.bmm.default, randn(3, m, k), randn(3, k, n))
    check(rng, aten.baddbmm.default, randn(3, m, n), randn(3, m, k), randn(3, k, n))
    square = randn(4, 4)
    check(rng, aten.mm.default, square, square)


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


def test_norms(rng):
    x = randn(3, 4, 5)
    check(rng, aten.native_layer_norm.default, x, [5], randn(5), randn(5), 1e-5)
    check(rng, aten.native_layer_norm.default, x, [4, 5], None, None, 1e-5)
    for output in (1, 2):
        check(rng, aten.native_layer_norm.default, x, [5], randn(5), randn(5), 1e-5, output=output, grad=0)
    y = randn(3, 6, 4, 5)
    check(rng, aten.native_group_norm.default, y, randn(6), randn(6), 3, 6, 20, 2, 1e-5)
    check(rng, aten.native_group_norm.default, y, None, None, 3, 6, 20, 3, 1e-5)
    statistics = randn(6).abs() + 0.5
    args = (randn(6), statistics)
    check(
        rng,
        aten._native_batch_norm_legit_no_training.default,
        y,
        randn(6),
        randn(6),
        *args,
        0.1,
        1e-5,
        grad=3,
    )
    check(rng, aten.native_batch_norm.default, y, None, None, *args, False, 0.1, 1e-5, grad=1)


def test_along_a_dimension(rng):
    x = randn(3, 4, 5)
    check(rng, aten._softmax.default, x, 1, False)
    check(rng, aten._log_softmax.default, x, -1, False)
    check(rng, aten._safe_softmax.default, x, 0)
    check(rng, aten.cumsum.default, x, 1)
    check(rng, aten.sort.default, x, -1)
    check(rng, aten.topk.default, x, 3, output=1)


def test_tables_and_places(rng):
    check(rng, aten.embedding.default, randn(7, 4), torch.randint(7, (3, 5)))
    check(rng, aten.gather.default, randn(3, 6), 1, torch.randint(6, (3, 2)))
    check(rng, aten.gather.default, randn(6, 5), 0, torch.randint(6, (2, 4)))
    check(rng, aten.index_select.default, randn(3, 6), 1, torch.randint(6, (4,)))


@pytest.mark.parametrize("causal", [False, True])
def test_attention(rng, causal):
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    query, key, value = (randn(3, 2, 6, 4) for _ in range(3))
    check(rng, target, query, key, value, 0.0, causal)
    check(rng, target, query, key, value, 0.0, causal, scale=0.3)
    if not causal:
        check(
            rng,
            target,
            query,
            randn(3, 2, 9, 4),
            randn(3, 2, 9, 4),
            0.0,
            False,
            attn_mask=randn(1, 1, 6, 9),
            grad=3,
        )


def test_reductions(rng):
    x = randn(3, 4, 5)
    for target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
        check(rng, target, x, [1], rng.random() < 0.5)
        check(rng, target, x, [-1, 0], True)
    check(rng, aten.sum.default, x)
    check(rng, aten.mean.default, x)
    check(rng, aten.var.correction, x, [1], correction=1)
    check(rng, aten.max.dim, x, 1)
    check(rng, aten.argmax.default, x, 1)
    check(rng, aten.logsumexp.default, x, [2])


def test_parts_of_sums_and_means_add_up(rng):
    x = randn(3, 4, 5)
    adds_up(rng, aten.sum.default, x)
    adds_up(rng, aten.mean.default, x)
    adds_up(rng, aten.sum.dim_IntList, x, [0, 2])
    adds_up(rng, aten.mean.dim, x, [-1], True)
    adds_up(rng, aten.mean.dim, x, [1, 0])


def test_parts_of_elementwise_losses_add_up(rng):
    x, y = randn(3, 4), randn(3, 4)
    for reduction in (1, 2):
        adds_up(rng, aten.mse_loss.default, x, y, reduction)
        adds_up(rng, aten.smooth_l1_loss.default, x, y, reduction, 0.7)
        adds_up(rng, aten.huber_loss.default, x, y, reduction, 0.7)
        adds_up(rng, aten.binary_cross_entropy.default, x.sigmoid(), y.sigmoid(), randn(4), reduction)
    check(rng, aten.mse_loss.default, x, y, 0)
    check(rng, aten.binary_cross_entropy.default, x.sigmoid(), y.sigmoid(), randn(4), 0, grad=1)


def likelihood(rng, flat):
    shape = (7,) if flat else (3, 4, 5)
    scores = randn(shape[0], 6, *shape[1:])
    targets = torch.randint(6, shape)
    targets[torch.rand(shape) < 0.3] = -1
    return (aten.nll_loss_forward if flat else aten.nll_loss2d_forward).default, scores, targets


def whole_parts(target, one):
    return [Part(target.placeholder(f"x{k}"), Rect.of_shape(v.shape)) for k, v in enumerate(one.inputs)]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_parts_of_likelihoods_add_up(rng, flat, weighted):
    target, scores, targets = likelihood(rng, flat)
    weights = randn(6).abs() if weighted else None
    check(rng, target, scores, targets, weights, 0, -1, grad=1)
    adds_up(rng, target, scores, targets, weights, 2, -1)
    one = single(target, scores, targets, weights, 1, -1)
    graph = fx.Graph()
    graph.output(loss_total(graph, one.call, one.op, one.graph, whole_parts(graph, one)))
    total = run(graph, *one.inputs)
    close(total, one.outputs[1])
    adds_up(rng, target, scores, targets, weights, 1, -1, total=total)
    adds_up(rng, target, scores, targets, weights, 1, -1, output=1)
    with pytest.raises(GraphError, match="loss_total"):
        tile(one, Rect((), ()), over=Rect((0,) * targets.ndim, (1,) * targets.ndim))


def test_gradients_of_a_likelihood_in_parts_are_those_of_the_whole(rng):
    target, scores, targets = likelihood(rng, False)
    scores.requires_grad_()
    one = single(target, scores, targets, None, 1, -1)
    parts = [
        tile(one, Rect((), ()), over=Rect((k, 0, 0), (k + 1, 4, 5)), total=one.outputs[1]) for k in range(3)
    ]
    (tiled,) = torch.autograd.grad(sum(parts), scores)
    (plain,) = torch.autograd.grad(target(scores, targets, None, 1, -1)[0], scores)
    torch.testing.assert_close(tiled, plain, rtol=1e-12, atol=1e-12)


REFUSED = [
    ("draws random numbers", aten.bernoulli.p, (randn(3), 0.5)),
    ("draws random numbers", aten.native_dropout.default, (randn(3), 0.5, True)),
    ("draws random numbers", aten.rand_like.default, (randn(3),)),
    ("writes into", aten.add_.Tensor, (randn(3), 1)),
    ("whole batch", aten.native_batch_norm.default, (randn(2, 3), None, None, None, None, True, 0.1, 1e-5)),
    ("another type", aten.view.dtype, (randn(3), torch.int64)),
    (
        "whole batch",
        aten._batch_norm_with_update.default,
        (randn(2, 3), None, None, randn(3), randn(3), 0.1, 1e-5),
    ),
    ("not next to", aten.slice_scatter.default, (randn(6), randn(3), 0, 0, 6, 2)),
    ("ends of rows", aten.roll.default, (randn(6), [2])),
    ("a mask", aten.index.Tensor, (randn(3), [torch.tensor([True, False, True])])),
    ("not among", aten.nonzero.default, (randn(3),)),
    ("not among", torch.ops.prims.sin.default, (randn(3),)),
    ("is empty", aten.slice.Tensor, (randn(3), 0, 2, 2)),
]


@pytest.mark.parametrize(("words", "target", "args"), REFUSED)
def test_what_cannot_be_run_on_parts_says_why(words, target, args):
    one = single(target, *args)
    assert words in supported(one.op, one.graph)
    with pytest.raises(CaptureError, match=words):
        tile(one, Rect.of_shape((1,) * one.outputs[0].ndim))


def test_only_the_first_result_where_others_speak_of_the_whole():
    one = single(aten.max_pool2d_with_indices.default, randn(1, 1, 4, 4), [2, 2])
    assert supported(one.op, one.graph) is None
    assert "first result" in supported(one.op, one.graph, output=1)


def test_a_part_that_does_not_hold_what_is_needed_is_named():
    one = single(aten.relu.default, randn(4))
    target = fx.Graph()
    parts = [Part(target.placeholder("x"), Rect((1,), (3,)))]
    with pytest.raises(GraphError, match=r"needs \[0:2\] of input 0 .* and \[1:3\] is there"):
        emit(target, one.call, one.op, one.graph, parts, Rect((0,), (2,)))
    with pytest.raises(GraphError, match="no part of an output"):
        emit(target, one.call, one.op, one.graph, parts, Rect((3,), (5,)))


def test_a_product_is_no_sum_of_parts():
    one = single(aten.mm.default, randn(2, 4), randn(4, 3))
    with pytest.raises(CaptureError, match="sum of parts"):
        tile(one, Rect((0, 0), (2, 3)), over=Rect((0,), (2,)))
