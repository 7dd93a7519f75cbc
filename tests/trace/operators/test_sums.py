import pytest
import torch
from torch import fx

from lowtide.errors import GraphError
from lowtide.graph import Rect
from lowtide.trace.operators import InputPart, loss_total
from tests.trace.operators.tiles import adds_up, check, close, randn, run, single, tile

aten = torch.ops.aten


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
    adds_up(rng, aten.dot.default, randn(7), randn(7))
    adds_up(rng, aten.mv.default, randn(4, 7), randn(7))
    adds_up(rng, aten.mm.default, randn(4, 7), randn(7, 3))
    adds_up(rng, aten.addmm.default, randn(3), randn(4, 7), randn(7, 3), alpha=2)
    adds_up(rng, aten.baddbmm.default, randn(2, 4, 3), randn(2, 4, 7), randn(2, 7, 3))
    check(rng, aten.mv.default, randn(4, 7), randn(7))


def test_channels_that_a_convolution_reads_add_up(rng):
    for turned in (False, True):
        weight = randn(5, 3, 3, 2) if turned else randn(3, 5, 3, 2)
        given = (randn(2, 5, 6, 7), weight, randn(3), [2, 1], [1, 0], [1, 2], turned, [0, 0], 1)
        adds_up(rng, aten.convolution.default, *given)


def test_parts_of_elementwise_losses_add_up(rng):
    x, y = randn(3, 4), randn(3, 4)
    for reduction in (1, 2):
        adds_up(rng, aten.mse_loss.default, x, y, reduction)
        adds_up(rng, aten.smooth_l1_loss.default, x, y, reduction, 0.7)
        adds_up(rng, aten.huber_loss.default, x, y, reduction, 0.7)
        adds_up(rng, aten.soft_margin_loss.default, x, y.sign(), reduction)
        adds_up(
            rng, aten.binary_cross_entropy_with_logits.default, x, y.sigmoid(), randn(4), randn(4), reduction
        )
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
    return [InputPart(target.placeholder(f"x{k}"), Rect.of_shape(v.shape)) for k, v in enumerate(one.inputs)]


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
