"""Under autocast a parameter is cast as often as in eager, and its gradients add up where eager adds them."""

import contextlib

import pytest
import torch
from torch import nn

from lowtide.execute.backend import compile_with
from lowtide.plan.program.simple import recompute_all, store_all
from lowtide.trace.eager.dynamo import lowtides

half = torch.bfloat16


def region(enabled=True):
    return torch.autocast("cpu", half, enabled=enabled)


def shared(model, x):
    with region():
        y = model(torch.tanh(model(x)))
    return y.float().square().sum()


def two_regions(model, x):
    with region():
        y = model(x)
    with region():
        return model(y.tanh()).float().square().sum()


def nested_regions(model, x):
    with region():
        y = model(x)
        with region():
            y = model(y)
        with region(enabled=False):
            y = model(y.float())
        return model(y).float().square().sum()


def own_casts(model, x):
    one, other = model.weight.to(half), model.weight.to(half)
    with region():
        y = x @ one + (x @ other).tanh() + x @ model.weight.to(half)
    return y.float().square().sum()


def of_results(model, x):
    with region():
        y = model(x).float()
        return (y @ model.weight + (y * 2) @ model.weight).float().square().sum()


def around(model, x):
    return model(torch.tanh(model(x))).float().square().sum()


STEPS = [shared, two_regions, nested_regions, own_casts, of_results, around]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def gradients(step, model, x, outside):
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with region() if outside else contextlib.nullcontext():
        loss = step(model, x)
    loss.backward()
    return [loss.detach(), x.grad, model.weight.grad, model.bias.grad]


@pytest.mark.parametrize("planner", [store_all, recompute_all])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_are_those_of_eager(step, planner):
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16), torch.randn(8, 16)
    backend = lowtides(lambda m, i: compile_with(m, i, planner))
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    expected = gradients(step, model, x, step is around)
    found = gradients(compiled, model, x, step is around)
    for one, other in zip(expected, found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def casts(step):
    """How often the step casts the weight."""
    model, x, found = nn.Linear(16, 16), torch.randn(8, 16), []

    def count(interpreter):
        graph = interpreter.joint.graph
        read = [op.inputs[0] for op in graph.ops if op.kind == "aten._to_copy" and op.inputs]
        found.append(sum(graph.tensors[t].label == "weight" for t in read))

    backend = lowtides(lambda m, i: compile_with(m, i, store_all, count))
    torch.compile(step, backend=backend, fullgraph=True)(model, x)
    return found[-1]


def test_a_region_casts_once_and_forgets_where_it_ends():
    assert casts(shared) == 1
    assert casts(two_regions) == 2
    assert casts(own_casts) == 3
