"""An error in the middle of a step leaves the user's model untouched, and nothing alive."""

import copy
import gc

import pytest
import torch
from torch import nn

from lowtide.cost.watch import Marker
from lowtide.errors import RunError
from lowtide.execute.backend import PROGRAMS, compile_with
from lowtide.execute.runtime import interpreter
from lowtide.execute.runtime.instructions import Running


class BrokenError(RuntimeError):
    """What the operator raises."""


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 2),
    )


def loss_of(model, x):
    return model(x).square().mean()


def batch():
    return torch.linspace(-1, 1, 20).view(5, 4)


def train(step, model):
    """One step with the same random numbers each time; what it leaves behind."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = step(model, batch())
    loss.backward()
    kept = [loss, *(p.grad for p in model.parameters()), *model.buffers()]
    return [t.detach().clone() for t in kept]


@pytest.fixture(autouse=True)
def few_objects():
    """What other tests left is none of ours, and takes long to look through."""
    gc.freeze()
    yield
    gc.unfreeze()


def tensors():
    """Every tensor there is, those in the frames of an error included."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]


def added(before):
    """Tensors that were not there before, by shape."""
    known = set(map(id, before))
    return [tuple(one.shape) for one in tensors() if id(one) not in known]


def break_call(interpreter, part, position, monkeypatch):
    """Make one of the calls of a part raise, with the tensors of the step in its frame."""

    def fail(frame):
        given = [one for one in frame.table if one is not None]
        raise BrokenError(f"no more memory for {len(given)} tensors")

    calls = list(getattr(interpreter, part))
    calls[position] = fail
    monkeypatch.setattr(interpreter, part, calls)


def break_once(lines, position, monkeypatch):
    """Make the operator at this place raise, as if the device had run out of memory in it."""
    line = [line for line in lines if isinstance(line, Running)][position]

    def fail(*args, **kwargs):
        raise BrokenError("no more memory")

    monkeypatch.setattr(line, "function", fail)


@pytest.fixture(params=["plain", "recompute-all"])
def setup(request):
    """A model that has made a step, what eager gives for the next one, and the compiled step with its interpreter."""
    torch._dynamo.reset()
    made = []
    step = torch.compile(
        loss_of,
        backend=lambda module, inputs: compile_with(
            module, inputs, PROGRAMS[request.param], watch=made.append
        ),
        fullgraph=True,
    )
    model = network()
    train(step, model)
    expected = train(loss_of, copy.deepcopy(model))
    yield model, step, made[0], expected
    torch._dynamo.reset()


def untouched(model):
    return copy.deepcopy(model.state_dict()), [
        None if p.grad is None else p.grad.clone() for p in model.parameters()
    ]


def same(one, other):
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][key], other[0][key]) for key in one[0])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("position", [0, 5, -1])
def test_an_error_in_forward(setup, monkeypatch, position):
    model, step, interpreter, expected = setup
    state = untouched(model)
    x = batch()
    before = tensors()
    with monkeypatch.context() as patch:
        break_call(interpreter, "_quick_forward", position, patch)
        with pytest.raises(BrokenError, match="no more memory") as caught:
            step(model, x)
    assert caught.value.__traceback__ is not None
    assert not added(before), "alive in the frames of the error"
    same(untouched(model), state)
    assert all(torch.equal(a, b) for a, b in zip(train(loss_of, copy.deepcopy(model)), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(train(step, model), expected, strict=True))


@pytest.mark.parametrize("position", [0, 5, -1])
def test_an_error_in_backward(setup, monkeypatch, position):
    model, step, interpreter, _ = setup
    model.zero_grad()
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    loss_of(other, batch())
    after_forward, expected = untouched(other), train(loss_of, other)
    torch.manual_seed(5)
    before = tensors()
    loss = step(model, batch())
    with monkeypatch.context() as patch:
        break_call(interpreter, "_quick_backward", position, patch)
        with pytest.raises(BrokenError, match="no more memory") as caught:
            loss.backward()
    assert caught.value.__traceback__ is not None
    with pytest.raises(RuntimeError, match="already been freed"):
        assert loss.grad_fn.saved_tensors
    del loss
    # torch's own frames keep the loss and its gradient, as they do in eager
    assert set(added(before)) <= {()}, "alive in the frames of the error"
    same(untouched(model), after_forward)
    assert all(torch.equal(a, b) for a, b in zip(train(loss_of, copy.deepcopy(model)), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(train(step, model), expected, strict=True))


def test_a_watch_is_told_that_an_operator_ended_even_if_it_failed(setup, monkeypatch):
    model, step, interpreter, _ = setup
    calls = []

    class Calls(Marker):
        def before(self, op):
            calls.append(op)

        def after(self, op):
            calls.remove(op)

    interpreter.marker = Calls()
    with monkeypatch.context() as patch:
        break_once(interpreter._forward, 3, patch)
        with pytest.raises(BrokenError):
            step(model, batch())
    interpreter.marker = None
    assert not calls


def test_nothing_of_a_step_outlives_it(setup):
    model, step, *_ = setup
    model.zero_grad()
    before = tensors()
    loss = step(model, batch())
    loss.backward()
    del loss
    model.zero_grad()
    assert not added(before)


def test_a_cuda_step_in_a_forked_process_is_refused(monkeypatch):
    model = network()
    step = torch.compile(loss_of, backend="lowtide")
    expected = train(step, copy.deepcopy(model))
    monkeypatch.setattr(interpreter, "lost_in_fork", lambda: True)
    for one, two in zip(expected, train(step, copy.deepcopy(model)), strict=True):
        assert torch.equal(one, two)  # a step on the CPU may be used there
    monkeypatch.setattr(interpreter, "_device", lambda joint: torch.device("cuda"))
    with pytest.raises(
        RunError, match="cannot be used in a process that is forked .*get_context\\('spawn'\\)"
    ):
        train(step, model)
