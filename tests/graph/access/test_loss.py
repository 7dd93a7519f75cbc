import pytest
import torch

from lowtide.graph import Rect
from lowtide.graph.access import Same, Whole
from tests.graph.access.probe import Probe, aten, check, integers, near, tensor

NONE, MEAN, SUM = 0, 1, 2
SHAPES = [(6, 4), (2, 4, 3, 2)]


def given(shape, weighted):
    scores = tensor(*shape)
    target = integers(shape[1], shape[0], *shape[2:])
    return scores, target, tensor(shape[1], seed=3, positive=True) if weighted else None


def kinds(shape):
    name = "nll_loss" if len(shape) == 2 else "nll_loss2d"
    return getattr(aten, f"{name}_forward").default, getattr(aten, f"{name}_backward").default


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_negative_log_likelihood(shape, weighted, reduction, ignored):
    scores, target, weight = given(shape, weighted)
    forward, backward = kinds(shape)
    # The score of another class may be read at an end, and an ignored one is not: ends need not matter.
    loss, total = check(forward, scores, target, weight, reduction, ignored, tight=False, summed=False)
    assert loss.inputs[0][1] == Whole()
    assert loss.scaled is (reduction == MEAN)
    assert loss.sums == total.sums == (() if reduction == NONE else tuple(target.shape))
    assert total.inputs[0] is None
    value, weights = forward(scores, target, weight, reduction, ignored)
    gradient = tensor(*value.shape, seed=4)
    call = (gradient, scores, target, weight, reduction, ignored, weights)
    relation = check(backward, *call, tight=False)[0]
    assert relation.inputs[1] is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_parts_of_a_loss_add_up(shape, reduction):
    call = given(shape, weighted=True)
    forward, _ = kinds(shape)
    probe = Probe(forward, (*call, reduction, -100))
    loss, total = probe.access.relations
    whole, weights = forward(*call, reduction, -100)
    for axis in range(len(loss.sums)):
        found = torch.zeros(2, dtype=torch.float64)
        for over in Rect.of_shape(loss.sums).split(axis, 2):
            needs = loss.needs(Rect((), ()), over)
            assert total.needs(Rect((), ()), over)[1:] == needs[1:]
            parts = [value[need.slices()] for value, need in zip(call, needs, strict=True)]
            found += torch.stack(forward(*parts, SUM, -100))
        assert near(found[1], weights)
        assert near(found[0] / (weights if loss.scaled else 1), whole)


def test_one_example():
    scores, target = tensor(5), torch.tensor(3)
    weight = tensor(5, seed=2, positive=True)
    check(aten.nll_loss_forward.default, scores, target, weight, MEAN, -100, tight=False)
    call = (tensor(), scores, target, weight, MEAN, -100, weight[3])
    relation = check(aten.nll_loss_backward.default, *call, tight=False)[0]
    assert relation.inputs == ((), None, (), (Same(0),), ())


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("kind", ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"])
def test_losses_of_elements(kind, reduction):
    one, other = tensor(3, 4), tensor(3, 4, seed=2)
    forward, backward = getattr(aten, kind).default, getattr(aten, f"{kind}_backward").default
    # A margin of zero is log(2) and no zero, so parts are not added up with zeros in place of the rest.
    zeros = kind != "soft_margin_loss"
    relation = check(forward, one, other, reduction, summed=zeros, tight=zeros)[0]
    assert relation.sums == (() if reduction == NONE else (3, 4))
    assert relation.scaled is (reduction == MEAN)
    gradient = tensor(*forward(one, other, reduction).shape, seed=3)
    last = [1.0] if kind in ("smooth_l1_loss", "huber_loss") else []
    check(backward, gradient, one, other, reduction, *last, tight=kind == "mse_loss")


def test_binary_cross_entropy():
    one, other = (torch.sigmoid(tensor(3, 4, seed=seed)) for seed in (1, 2))
    weight = tensor(4, seed=3, positive=True)
    inside = {0: lambda: torch.full((3, 4), 0.3, dtype=torch.float64)}
    relation = check(
        aten.binary_cross_entropy.default, one, other, weight, MEAN, tight=False, summed=False, valid=inside
    )[0]
    assert relation.sums == (3, 4)
    assert relation.scaled
    check(
        aten.binary_cross_entropy_backward.default,
        tensor(),
        one,
        other,
        weight,
        MEAN,
        tight=False,
        valid={1: inside[0]},
    )
    logits = aten.binary_cross_entropy_with_logits.default
    assert check(logits, tensor(3, 4), other, None, None, SUM, tight=False, summed=False)[0].sums == (3, 4)
