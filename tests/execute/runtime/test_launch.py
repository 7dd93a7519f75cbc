"""Parts of a Program as flat lists of calls: what is left out, what is kept for others, what is checked."""

import pytest
import torch
from torch import nn

from lowtide.execute.backend import PROGRAMS, compile_with
from lowtide.execute.runtime import interpreter as interpreters
from lowtide.execute.runtime.instructions import Running
from lowtide.torch_internals import TorchDispatchMode


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """Chains of views between matrix products."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        parts = self.inward(x).view(2, 4, 3, 2, 4).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = (query @ key.transpose(2, 3)).softmax(-1) @ value
        return self.outward(mixed.transpose(1, 2).reshape(2, 4, 8))


def loss_of(model, x):
    return model(x).square().mean()


def compiled(function, program="plain"):
    made = []

    def backend(module, inputs):
        return compile_with(module, inputs, PROGRAMS[program], watch=made.append)

    return torch.compile(function, backend=backend, fullgraph=True), made


def left_behind(step, model, x):
    model.zero_grad()
    loss = step(model, x)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("program", ["plain", "recompute-all"])
def test_calls_leave_what_the_instructions_leave(program, monkeypatch):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 4, 8)
    step, made = compiled(loss_of, program)
    expected = left_behind(loss_of, model, x)
    calls = left_behind(step, model, x)
    ran = []
    run = Running.__call__
    monkeypatch.setattr(Running, "__call__", lambda line, frame: (ran.append(line), run(line, frame)))
    monkeypatch.setattr(interpreters, "calls_are_watched", lambda: True)
    lines = left_behind(step, model, x)
    runs = [line for line in (*made[-1]._forward, *made[-1]._backward) if isinstance(line, Running)]
    assert len(ran) == len(runs), "somebody watches: the lines run as they are"
    for one, two, three in zip(expected, calls, lines, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_a_dispatch_mode_is_shown_every_operator():
    class Kinds(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kinds.append(str(function))
            return function(*args, **(kwargs or {}))

    kinds = []
    model, x = Attention(), torch.randn(2, 4, 8)
    step, made = compiled(loss_of)
    loss = step(model, x)
    with Kinds():  # torch runs no compiled forward in one
        loss.backward()
    runs = [line for line in made[-1]._backward if isinstance(line, Running)]
    views = [line for line in runs if made[-1].joint.graph.ops[line.op].kind == "aten.view"]
    assert kinds.count("aten.view.default") >= len(views) > 4


def test_views_that_no_operator_reads_are_not_made():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 4, 8)
    step, made = compiled(loss_of)
    left_behind(step, model, x)
    ops = made[-1].joint.graph.ops
    runs = [line for line in made[-1]._forward if isinstance(line, Running)]
    views = [line for line in runs if line.op in made[-1]._views.operators]
    calls = [step for step in made[-1]._quick_forward if "_clear" not in step.__qualname__]
    assert {"aten.view", "aten.unbind", "aten.transpose"} <= {ops[line.op].kind for line in views}
    others = len(runs) - len(views)
    assert others < len(calls) < others + len(views) - 4
    again = {view for view, _ in made[-1]._again}
    assert again, "backward makes views again from what they are views of"
    assert again.isdisjoint(made[-1].saved)


def test_an_input_that_is_changed_before_backward_is_noticed_through_its_views():
    model, x = nn.Linear(4, 3), torch.randn(6, 2, requires_grad=True)
    step, made = compiled(lambda model, x: model(x.view(3, 4).t().t()).square().sum())
    step(model, x).backward()
    assert made[-1]._again
    loss = step(model, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_result_that_is_changed_before_backward_is_noticed_through_its_views():
    model, x = nn.Linear(4, 4), torch.randn(6, 4)

    def function(model, x):
        made = model(x)
        return made, made.view(4, 6).t().sigmoid().mul(made.view(6, 4)).sum()

    step, _ = compiled(function)
    made, loss = step(model, x)
    with torch.no_grad():
        made.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
