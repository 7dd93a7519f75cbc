"""Allocations are seen also where the user's profiler is on."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu


def seen(function):
    result, allocations = watch_cpu(function)
    return result, allocations.peak_bytes, allocations.workspace_bytes(0)


def squared(marker):
    """Two tensors of 4,000 bytes, one of which is a workspace."""
    marker.before(0)
    value = torch.ones(1000) + torch.ones(1000)
    marker.after(0)
    return value.requires_grad_() * 2, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_profiler_of_the_user_changes_nothing(gradients, autocast):
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", enabled=autocast):
        (value, *modes), *found = seen(squared)
        with torch.profiler.profile() as profile:
            (again, *same), *also = seen(squared)
    assert modes == same == [gradients, autocast]
    assert value.requires_grad == again.requires_grad == gradients
    assert found == also
    assert profile.events() is not None


def test_inference_mode_holds_there_too():
    with torch.inference_mode(), torch.profiler.profile():
        value, _ = watch_cpu(lambda _: torch.ones(3) + 1)
    assert value.is_inference()


def test_what_fails_inside_is_raised():
    def fails(_):
        raise ValueError("inside")

    for _ in range(2):
        with torch.profiler.profile(), pytest.raises(ValueError, match="inside"):
            watch_cpu(fails)


def test_a_step_is_fitted_inside_a_profiler():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(128, 64)

    def loss_of(model, x):
        return model(x).square().mean()

    with torch.profiler.profile():
        step = lowtide.fit(loss_of, model, x, budget="80%", time_limit=0.3, cache=False)
        step(model, x).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss_of(model, x).backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(found, model.parameters(), strict=True))
    assert step.plan.cost == "measured"
