"""Results beside the loss: no gradients of theirs are expected, and those that come are taken."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu


def scoring(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), *more, nn.Linear(32, 256))


def loss_of(model, x):
    scores = model(x)
    return {"loss": scores.square().mean(), "scores": scores}


def left_behind(model, step, x, weight=0.0):
    model.zero_grad()
    torch.manual_seed(1)
    found = step(model, x)
    loss = found["loss"] if not weight else found["loss"] + weight * found["scores"].tanh().sum()
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    return [loss.detach(), found["scores"].detach(), *grads, *model.buffers(), torch.rand(2)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_no_zeros_are_made_for_scores_that_nobody_differentiates():
    model, x = scoring(nn.Dropout(0.2)), torch.randn(128, 16)
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.2)
    assert same(left_behind(model, step, x), left_behind(twin, loss_of, x))
    peaks = []
    for function in (step, loss_of):
        model.zero_grad(set_to_none=True)
        _, seen = watch_cpu(lambda _, function=function: function(model, x)["loss"].backward())
        peaks.append(seen.peak_bytes)
    assert peaks[0] <= peaks[1]


def test_a_gradient_that_comes_after_all_is_added_and_then_planned_for():
    model, x = scoring(nn.Dropout(0.2)), torch.randn(128, 16)
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.2)
    expected = left_behind(twin, loss_of, x, 0.5)
    with pytest.warns(UserWarning, match="a gradient of a result beside the loss comes"):
        found = left_behind(model, step, x, 0.5)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6 * float(other.abs().max()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(left_behind(model, step, x, 0.5), expected)


def test_a_step_that_updates_something_expects_all_gradients():
    model, x = scoring(nn.BatchNorm1d(32)), torch.randn(128, 16)
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for weight in (0.0, 0.5):
            assert same(left_behind(model, step, x, weight), left_behind(twin, loss_of, x, weight))


def test_the_model_can_be_freed():
    model, x = scoring(), torch.randn(128, 16)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.2)
    left_behind(model, step, x)
    left = weakref.ref(model[0].weight)
    del model, step
    gc.collect()
    assert left() is None
