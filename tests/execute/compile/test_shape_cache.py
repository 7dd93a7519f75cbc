"""Batch sizes that change: each is captured once, the least used plans are dropped, and nothing is symbolic."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from lowtide.execute.backend import PROGRAMS, compile_with
from lowtide.execute.compile.shape_cache import Remembering


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    gc.freeze()  # what other tests left is none of ours, and takes long to look through
    yield
    gc.unfreeze()
    torch._dynamo.reset()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2))


def step(model, x):
    out = model(x)
    return out.reshape(-1), out.mean() * x.shape[0], x.shape[0] * 2


def train(function, model, sizes, number=None):
    """Everything that steps with these batch sizes give, one after the other."""
    seen = []
    for position, size in enumerate(sizes):
        torch.manual_seed(position)
        flat, loss, count = function(model, torch.randn(size, 3))
        (loss + flat.sum()).backward()
        seen += [flat.detach().clone(), loss.detach().clone(), torch.tensor(count)]
        seen += [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
        seen.append(torch.get_rng_state())
    return seen


def compiled(planner, made, **options):
    def backend(module, inputs):
        return compile_with(module, inputs, planner, watch=made.append, **options)

    return backend


def equal(one, other):
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_each_size_is_captured_once_and_stays_exact(program, dynamic):
    sizes = (2, 3, 4, 5, 2, 3)
    model = network()
    expected = train(step, copy.deepcopy(model), sizes)
    made = []
    backend = compiled(PROGRAMS[program], made)
    function = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    assert equal(train(function, model, sizes), expected)
    assert len(made) == 4
    shapes = [one.joint.graph.tensors[t].shape for one in made for t in one.joint.inputs if t is not None]
    assert {shape[0] for shape in shapes if shape[1:] == (3,)} >= {2, 3, 4, 5}


def test_the_least_used_plan_is_dropped():
    made = []
    function = torch.compile(step, backend=compiled(PROGRAMS["plain"], made, remember=2), fullgraph=True)
    model = network()
    train(function, model, (2, 3, 4, 3, 5))
    assert len(made) == 4
    train(function, model, (3, 5))
    assert len(made) == 4, "3 and 5 were used last"
    train(function, model, (4,))
    assert len(made) == 5
    gc.collect()
    train(function, model, (3,))
    assert len(made) == 6, "3 had to make room for 4"


def test_evaluation_has_plans_of_its_own():
    made = []
    function = torch.compile(step, backend=compiled(PROGRAMS["recompute-all"], made), fullgraph=True)
    model, other = network(), network()
    for size in (2, 3, 4, 2):
        x = torch.randn(size, 3)
        with torch.no_grad():
            assert equal(function(model.eval(), x)[:2], step(other.eval(), x)[:2])
    assert len(made) == 3
    assert not any(one.program.backward for one in made)


def test_the_first_batch_is_not_kept_alive():
    kept = []

    def backend(module, inputs):
        kept.append(compile_with(module, inputs, PROGRAMS["plain"]))
        return kept[-1]

    function = torch.compile(step, backend=backend, fullgraph=True)
    model = network()
    for size in (2, 3, 4):
        x = torch.randn(size, 3)
        gone = weakref.ref(x)
        function(model, x)
        del x
        gc.collect()
        assert gone() is None
    assert isinstance(kept[-1], Remembering)


def test_two_functions_that_differ_in_a_number_are_not_confused():
    """The first shape of one function must not answer for another whose graph looks alike."""
    made = []

    def scaled(x, flag):
        return (x * (2 if flag else 3)).exp()

    function = torch.compile(scaled, backend=compiled(PROGRAMS["plain"], made), fullgraph=True)
    for size, flag in ((2, True), (3, False), (2, False), (3, True), (2, True)):
        x = torch.randn(size, 3, requires_grad=True)
        assert torch.equal(function(x, flag), scaled(x, flag)), (size, flag)


def test_sizes_and_numbers_change_together():
    made = []

    def scaled(x, factor):
        return (x * factor).view(-1, x.shape[0]) + x.sum() / (x.shape[0] ** 2 + factor)

    function = torch.compile(scaled, backend=compiled(PROGRAMS["recompute-all"], made), fullgraph=True)
    for size in (2, 4, 6, 2, 4):
        for factor in (0.3, 0.7):
            x = torch.randn(size, 4, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            one, other = function(x, factor), scaled(y, factor)
            assert torch.equal(one, other), (size, factor)
            one.sum().backward()
            other.sum().backward()
            assert torch.equal(x.grad, y.grad), (size, factor)
