"""Allocations are seen also where the user's profiler is on."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu, watch_cuda


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


class Counters:
    """CUDA's counters of allocated bytes, without a device."""

    def __init__(self, monkeypatch):
        self.now = self.most = 1000
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(self, "most", self.now))

    def take(self, size):
        self.now += size
        self.most = max(self.most, self.now)


def test_what_runs_inside_of_an_operator_is_told_apart_by_the_counters_of_cuda(monkeypatch):
    memory = Counters(monkeypatch)

    def step(marker):
        marker.before(0)
        memory.take(100)  # 100 live at the end
        marker.after(0)
        memory.take(50)
        memory.take(-50)
        marker.before(1)
        memory.take(10)
        inner = marker.inside()
        for size in (300, 40):
            inner.before(7)
            memory.take(size)
            memory.take(-size)
            inner.after(7)
        memory.take(60)
        memory.take(-70)
        marker.after(1)

    _, found = watch_cuda(step, torch.device("cuda"))
    assert found.operators == {0: [(0, 100, 100)], 1: [(100, 410, 100)]}
    assert found.inside == {0: [()], 1: [(110, 410, 170)]}
    assert found.peak_bytes == 410
    assert found.end_bytes == 100


def test_and_on_the_cpu():
    def step(marker):
        marker.before(0)
        kept = torch.empty(1000, dtype=torch.uint8)
        inner = marker.inside()
        for size in (5000, 300):
            inner.before(3)
            torch.empty(size, dtype=torch.uint8)
            inner.after(3)
        marker.after(0)
        return kept

    _, found = watch_cpu(step)
    first, second, third = found.inside[0][0]
    assert first >= 1000
    assert (second - first, third - first) == (5000, 300)
    assert max(found.curve) == found.peak_bytes
