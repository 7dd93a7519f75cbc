"""BatchNorm again from its statistics: the bits of a whole second run, buffers updated once."""

import copy

import pytest
import torch
from torch import nn

from lowtide.cost import measure as module
from lowtide.cost.measure import measure
from lowtide.execute.backend import compile_with
from lowtide.plan.budget import parse_budget
from lowtide.plan.make import Costs, make_plan
from lowtide.plan.program import Run
from tests.cost.steps import Captured


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(3, 8), (8, 8), (8, 8), (8, 8)]
        self.body = nn.Sequential(
            *(
                layer
                for before, after in sizes
                for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
            )
        )

    def forward(self, x):
        return self.body(x).square().mean()


def loss_of(model, x):
    return model(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Network()


def planned(graph, programs):
    """Half of the memory; BatchNorms are cheap to run again."""
    short = {k: 0.1 for k, op in enumerate(graph.ops) if op.attributes.get("short")}
    costs = Costs((1.0,) * len(graph.ops), short=short)
    plan = make_plan(graph, costs, parse_budget("55%"))
    programs.append(plan.program)
    return plan.program


def test_a_step_with_short_runs_is_bitwise_equal(model):
    torch.manual_seed(1)
    x = torch.randn(4, 3, 16, 16)
    programs, results = [], []
    for ours in (False, True):
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        step = loss_of
        if ours:
            step = torch.compile(
                loss_of,
                backend=lambda m, i: compile_with(m, i, lambda graph: planned(graph, programs)),
                fullgraph=True,
            )
        for _ in range(2):
            own.zero_grad()
            loss = step(own, x)
            loss.backward()
        results.append(
            [loss.detach(), *(p.grad for p in own.parameters()), *(b.clone() for b in own.buffers())]
        )
    lines = [line for program in programs for line in program.backward if isinstance(line, Run)]
    assert sum(line.short for line in lines) >= 2
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def costs_of(model, x):
    captured = Captured(loss_of, model, x)
    found = measure(captured.graph, captured.targets, captured.run).costs
    norms = [k for k, op in enumerate(captured.graph.ops) if op.attributes.get("short")]
    return [found[k].short_seconds for k in norms]


def test_a_second_run_of_other_bits_is_not_used(model, monkeypatch):
    real = module.short_run

    def nearly(*given):
        made = real(*given)
        made.view(-1)[7] += 1e-6
        return made

    monkeypatch.setattr(module, "short_run", nearly)
    assert costs_of(model, torch.randn(4, 3, 16, 16)) == [None] * 4


def test_too_few_values_prove_nothing(model, monkeypatch):
    monkeypatch.setattr(module, "short_run", None)  # not even called
    assert costs_of(model, torch.randn(1, 3, 4, 4)) == [None] * 4


def test_equal_bits_in_less_time_are_used(model, monkeypatch):
    monkeypatch.setattr(module, "short_run", lambda source, *_: source)  # in no time
    monkeypatch.setattr(module, "_same", lambda one, other: one.shape == other.shape)
    found = costs_of(model, torch.randn(16, 3, 32, 32))
    assert all(figure is not None and figure.value < 1e-4 for figure in found)
