"""BatchNorm again from its statistics: the bits of a whole second run, buffers updated once."""

import copy

import msgspec
import pytest
import torch
from torch import nn

from lowtide.cost import Cost, Figure, Origin
from lowtide.cost import measure as module
from lowtide.cost.measure import measure
from lowtide.errors import PlanError
from lowtide.execute.backend import compile_with
from lowtide.plan.budget import parse_budget
from lowtide.plan.check.checker import check
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Program, Run
from lowtide.plan.program.short_reruns import JOINED, short_seconds
from tests.cost.steps import Captured
from tests.planning import plan_for


class Network(nn.Module):
    """Convolutions, each with a BatchNorm; behind it a ReLU, or a skip and a ReLU."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1) for k in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x):
        for k, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            made = norm(convolution(x))
            x = (made + x if k in (1, 3) else made).relu()
        return x.square().mean()


def loss_of(model, x):
    return model(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Network()


def planned(graph, programs):
    """Half of the memory; BatchNorms are cheap to run again, with what follows them."""
    figures = {name: Figure(0.1, Origin.MEASURED) for name in ("", "relu", "add", "add,relu")}
    cost = [Cost(short_seconds=figures if op.short else {}) for op in graph.ops]
    short = short_seconds(graph, cost)
    assert len(short) == 4 + 2 + 4  # norms, sums, ReLUs
    able = [k for k in short if graph.ops[k].kind in JOINED]
    plan = plan_for(
        graph, Costs((1.0,) * len(graph.ops), short=short), parse_budget("50%"), able=able, time_limit=1
    )
    programs.append((graph, plan))
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
                backend=lambda m, i: compile_with(
                    m, i, lambda graph: planned(graph, programs), in_place=False
                ),
                fullgraph=True,
            )
        for _ in range(2):
            own.zero_grad()
            loss = step(own, x)
            loss.backward()
        results.append(
            [loss.detach(), *(p.grad for p in own.parameters()), *(b.clone() for b in own.buffers())]
        )
    ((graph, plan),) = programs
    kinds = [
        graph.ops[line.op].kind for line in plan.program.backward if isinstance(line, Run) and line.short
    ]
    assert {"aten.relu", "aten.add"} < set(kinds)
    assert plan.predicted.seconds - plan.plain.seconds == pytest.approx(
        0.1 * sum(kind not in JOINED for kind in kinds)
        + sum(isinstance(line, Run) and not line.short for line in plan.program.instructions)
        - len(graph.ops)
    )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    parts = (plan.program.forward, plan.program.backward)
    alone = [tuple(line if joined(graph, line) else without(line) for line in part) for part in parts]
    with pytest.raises(PlanError, match="as part of a run before it"):
        check(graph, Program(*alone))


def joined(graph, line):
    return isinstance(line, Run) and graph.ops[line.op].kind in JOINED


def without(line):
    return msgspec.structs.replace(line, short=False) if isinstance(line, Run) else line


def costs_of(model, x):
    captured = Captured(loss_of, model, x)
    found = measure(captured.graph, captured.targets, captured.run).costs
    norms = [k for k, op in enumerate(captured.graph.ops) if op.short]
    return [found[k].short_seconds for k in norms]


def test_a_second_run_of_other_bits_is_not_used(model, monkeypatch):
    real = module.short_run

    def nearly(*given):
        made = real(*given)
        made.view(-1)[7] += 1e-6
        return made

    monkeypatch.setattr(module, "short_run", nearly)
    assert costs_of(model, torch.randn(4, 3, 16, 16)) == [{}] * 4


def test_a_compiler_that_fails_is_told_and_the_step_goes_on(model, monkeypatch):
    def broken(*_):
        raise ValueError("no such thing")

    monkeypatch.setattr(module, "short_run", broken)
    with pytest.warns(UserWarning, match="runs again as a whole, its short form fails: no such thing"):
        assert costs_of(model, torch.randn(4, 3, 16, 16)) == [{}] * 4


def test_too_few_values_prove_nothing(model, monkeypatch):
    monkeypatch.setattr(module, "short_run", None)  # not even called
    assert costs_of(model, torch.randn(1, 3, 4, 4)) == [{}] * 4


def test_equal_bits_in_less_time_are_used(model, monkeypatch):
    monkeypatch.setattr(module, "short_run", lambda source, *_: source)  # in no time
    monkeypatch.setattr(module, "_same", lambda one, other: one.shape == other.shape)
    found = costs_of(model, torch.randn(16, 3, 32, 32))
    assert all(list(one) == [""] and one[""].value < 1e-4 for one in found)
