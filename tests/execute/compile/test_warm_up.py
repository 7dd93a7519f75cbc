"""Models that set something up at their first call, in a way that torch cannot trace: captured behind it."""

import copy
import threading

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import GraphBreakError
from lowtide.execute.compile.warm_up import run_once

pytestmark = pytest.mark.usefixtures("fresh")


class Layers(nn.Sequential):
    """A module of the user's: torch captures it where it gives up on what calls it."""

    def forward(self, x):
        return super().forward(x) * 1.0


class SetsUp(nn.Module):
    """Builds a table at its first call, under a lock."""

    def __init__(self):
        super().__init__()
        self.lock, self.table, self.calls = threading.Lock(), None, 0
        self.layers = Layers(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1)
        )

    def forward(self, x):
        if self.table is None:
            with self.lock:
                self.table = torch.arange(16.0)
        return self.layers(x + self.table).square().mean()


class LocksAlways(SetsUp):
    def forward(self, x):
        self.table = None
        return super().forward(x)


def test_what_a_first_call_sets_up_breaks_no_graph():
    torch.manual_seed(0)
    model, x = SetsUp(), torch.randn(64, 16)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    state = torch.random.get_rng_state()
    step = lowtide.fit(model, x, budget="100%", fullgraph=True, time_limit=1.0)
    assert model.table is not None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(1)
    planned = step(x)
    planned.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.load_state_dict(buffers, strict=False)
    torch.manual_seed(1)
    eager = model(x)
    eager.backward()
    assert torch.equal(planned, eager)
    assert all(torch.equal(one, p.grad) for one, p in zip(found, model.parameters(), strict=True))


def test_what_every_call_does_is_refused_or_planned_in_parts():
    model, x = LocksAlways(), torch.randn(64, 16)
    with pytest.raises(GraphBreakError, match=r"lock|context manager"):
        lowtide.fit(model, x, budget="100%", fullgraph=True, time_limit=1.0)
    torch._dynamo.reset()
    step = lowtide.fit(model, x, budget="100%", time_limit=1.0)
    assert "break" in step.explain()


def test_a_step_that_fails_as_it_is_fails_as_before():
    class Fails(SetsUp):
        def forward(self, x):
            super().forward(x)
            raise ValueError("not today")

    with pytest.raises(lowtide.LowtideError, match="not today"):
        lowtide.fit(Fails(), torch.randn(4, 16), budget="100%", time_limit=1.0)


class UpdatesInForward(SetsUp):
    """Each call updates a parameter, an attribute, part of a tensor and a buffer that it binds anew."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.register_buffer("mean", torch.zeros(16))
        self.largest, self.calls = torch.zeros(2, 16), 0

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.teacher.mul_(0.9).add_(x.mean(0) + 1)
            self.largest[1] += x.amax(0)
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return super().forward(x - self.mean - self.teacher - self.largest[1])


class SetsTensors(SetsUp):
    """Its first call writes on a parameter and on a buffer, and keeps in an attribute that it has."""

    def __init__(self):
        super().__init__()
        self.offset, self.ready = nn.Parameter(torch.zeros(16)), False
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        if not self.ready:
            with self.lock, torch.no_grad():
                self.offset.copy_(x.mean(0) + 1)
                self.scale.copy_(x.std(0) * 2)
            self.ready = True
        return super().forward((x - self.offset) / self.scale)


def two_steps(step, model, x):
    """Losses, gradients and buffers of two steps."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = step(x)
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


def twin_of(model):
    """The same model, with a lock of its own."""
    lock, model.lock = model.lock, None
    twin = copy.deepcopy(model)
    model.lock, twin.lock = lock, threading.Lock()
    return twin


@pytest.mark.parametrize("kind", [SetsUp, UpdatesInForward, SetsTensors])
def test_what_each_call_changes_is_put_back_and_what_the_first_sets_up_stays(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 16)
    twin = twin_of(model)
    step = lowtide.fit(model, x, budget="100%", fullgraph=True, time_limit=1.0)
    assert model.calls == 0
    expected = two_steps(twin, twin, x)
    found = two_steps(step, model, x)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert model.calls == twin.calls


def test_nothing_stays_of_a_first_call_that_fails():
    class NeedsGradients(UpdatesInForward):
        def forward(self, x):
            loss = super().forward(x)
            if not torch.is_grad_enabled():
                raise RuntimeError("there are no gradients")
            return loss

    model, x = NeedsGradients(), torch.randn(64, 16)
    state = copy.deepcopy(model.state_dict())
    assert not run_once(model, (x,), {}, [model])
    assert (model.table, model.calls) == (None, 0)
    assert not model.largest.any()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_modules_without_sizes_get_them():
    torch.manual_seed(0)
    model, x = nn.Sequential(SetsUp(), nn.Identity()), torch.randn(64, 16)
    model[0].layers[1] = nn.LazyBatchNorm1d()
    step = lowtide.fit(model, x, budget="100%", fullgraph=True, time_limit=1.0)
    assert torch.isfinite(step(x))
    assert model[0].layers[1].weight.shape == (32,)
