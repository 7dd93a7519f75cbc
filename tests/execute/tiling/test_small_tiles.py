"""Small steps in tiles: every sort of leaf, and every form of a loss that is a sum."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.execute.tiling.tiles import in_tiles

DTYPE = torch.float64


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def convolutions():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3)).to(DTYPE)


def linear():
    return nn.Linear(4, 4).to(DTYPE)


def images():
    return torch.randn(3, 2, 9, 8, dtype=DTYPE)


def rows():
    return torch.randn(6, 4, dtype=DTYPE)


def squares(model, x):
    return model(x).square().sum()


def both(function, model, x, parts):
    """Loss and gradients of the whole step and of the one in tiles; those of the input are last."""
    found = []
    for step in (function, in_tiles(function, parts)):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(0)
        loss = step(model, x)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters()), x.grad])
    return found


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradients_of_inputs_where_tiles_overlap():
    whole, tiled = both(squares, convolutions(), images().requires_grad_(), (2, 1, 2, 1))
    same(whole, tiled)
    assert whole[-1] is not None


def test_gradients_lie_in_memory_as_their_leaves():
    model = convolutions().to(memory_format=torch.channels_last)
    x = images().contiguous(memory_format=torch.channels_last).requires_grad_()
    whole, tiled = both(squares, model, x, (2, 1, 2, 1))
    same(whole, tiled)
    assert [g.stride() for g in tiled] == [g.stride() for g in whole]


def test_frozen_parameters_get_none():
    model = convolutions()
    model[0].weight.requires_grad_(False)
    whole, tiled = both(squares, model, images(), (2, 1, 2, 1))
    same(whole, tiled)
    assert tiled[1] is None


def test_parameters_that_are_not_used_get_none():
    model = nn.ModuleList([linear(), linear()])
    whole, tiled = both(lambda model, x: model[0](x).square().mean(), model, rows(), (2,))
    same(whole, tiled)
    assert tiled[3] is None


@pytest.mark.parametrize(
    "x", [torch.randn(4, 6, dtype=DTYPE).t(), torch.randn(1, 4, dtype=DTYPE).expand(6, 4)]
)
def test_inputs_with_strides_of_their_own(x):
    same(*both(squares, linear(), x, (2,)))


def test_what_no_tile_reads_has_no_gradient():
    x = rows().requires_grad_()
    whole, tiled = both(lambda model, x: model(x[1:4]).square().mean(), linear(), x, (2,))
    same(whole, tiled)
    assert not tiled[-1][4:].any()


def weighted_by_a_constant(model, x):
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=DTYPE)
    return (model(x) * weight).square().sum()


def chosen_by_a_constant(model, x):
    return model(x)[torch.tensor([3, 1, 1])].square().mean()


def several_constants(model, x):
    first, second = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=DTYPE), torch.tensor(0.5, dtype=DTYPE)
    return functional.binary_cross_entropy_with_logits(model(x * first), x.sigmoid(), pos_weight=second)


@pytest.mark.parametrize("step", [weighted_by_a_constant, chosen_by_a_constant, several_constants])
def test_constants_of_the_users_code_stay_what_they_are(step):
    same(*both(step, linear(), rows().requires_grad_(), (2,)))


LOSSES = {
    "linear behind the sum": lambda model, x: -(model(x).square().mean() / 3) * 2.0,
    "mean of sums": lambda model, x: model(x).square().sum(1).mean(),
    "batchmean": lambda model, x: functional.kl_div(
        model(x).log_softmax(1), x.softmax(1), reduction="batchmean"
    ),
    "smooth l1": lambda model, x: functional.smooth_l1_loss(model(x), x, reduction="sum"),
    "soft labels": lambda model, x: functional.cross_entropy(model(x), x.softmax(1)),
    "softmax over the batch": lambda model, x: model(x).softmax(0).square().sum(),
    "a running sum": lambda model, x: model(x).cumsum(0).square().sum(),
    "noise": lambda model, x: (model(x) * torch.rand_like(x)).sum(),
    "parameters alone": lambda model, x: model.weight.square().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_forms_of_a_loss(name):
    same(*both(LOSSES[name], linear(), rows(), (2,)))
