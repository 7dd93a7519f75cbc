"""Models that set something up at their first call, in a way that torch cannot trace: captured behind it."""

import threading

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import GraphBreakError


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
