"""A step is traced by AOTAutograd once, however often it is compiled."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.execute.compile import traced


class Counting:
    """Counts traces."""

    def __init__(self, monkeypatch):
        self.traces, original = 0, traced.aot_autograd

        def counted(**options):
            self.traces += 1
            return original(**options)

        monkeypatch.setattr(traced, "aot_autograd", counted)


class Buffered(nn.Module):
    """Parameters twice, a buffer that is updated, dropout, an input that is changed."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x, count):
        count += 1
        y = self.norm(self.first(x)).relu_()
        return self.second(nn.functional.dropout(y, 0.3, self.training)) * count


def loss_of(model, x, count):
    return model(x, count).square().mean()


def stepped(model, step, x):
    count = torch.ones(3)[:1]
    torch.manual_seed(1)
    loss = step(model, x, count)
    loss.backward()
    return [loss.detach(), count, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("budget", ["100%", "80%"])
def test_a_step_is_traced_once_and_gives_what_eager_gives(monkeypatch, budget):
    counting = Counting(monkeypatch)
    torch.manual_seed(0)
    model, x = Buffered(), torch.randn(64, 8)
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, x, torch.ones(3)[:1], budget=budget, time_limit=0.5, only="recompute")
    assert counting.traces == 1
    for _ in range(2):
        got, right = stepped(model, step, x), stepped(twin, loss_of, x)
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
        model.zero_grad()
        twin.zero_grad()


def test_where_torch_has_no_stages_it_is_traced_again(monkeypatch):
    counting = Counting(monkeypatch)
    monkeypatch.setattr(traced, "part_of_compiler", lambda _: None)
    model, x = Buffered(), torch.randn(64, 8)
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, x, torch.ones(3)[:1], budget="90%", time_limit=0.5, only="recompute")
    assert counting.traces == 2
    got, right = stepped(model, step, x), stepped(twin, loss_of, x)
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


def test_evaluation_is_traced_once(monkeypatch):
    counting = Counting(monkeypatch)
    model, x = Buffered().eval(), torch.randn(64, 8)
    with torch.no_grad():
        step = lowtide.fit(loss_of, model, x, torch.ones(1), budget="100%", time_limit=0.5)
        assert counting.traces == 1
        assert torch.equal(step(model, x, torch.ones(1)), loss_of(model, x, torch.ones(1)))
