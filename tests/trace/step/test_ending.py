"""The update at the end of a step: its operators in the graph, and the same bits when they are run."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.cost.watch import Marker
from lowtide.errors import CaptureError
from lowtide.graph import Phase, Role
from lowtide.zoo import locallyconnected


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def loss_of(model, x):
    return model(x).square().sum()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))


def captured_with(update, model):
    return lowtide.capture(loss_of, model, torch.randn(5, 3)).with_update(model, update)


def test_the_network_of_the_picture_ends_with_an_update_of_each_parameter(monkeypatch):
    monkeypatch.setattr(locallyconnected, "KERNELS", (3, 2))  # an operator or two for each of 130 places
    built = zoo.build(zoo.small("locallyconnected"))
    before = {name: value.clone() for name, value in built.model.state_dict().items()}
    plain = lowtide.capture(built.loss, built.model, *built.batch)
    captured = plain.with_update(built.model, built.ending)
    graph = captured.step.graph
    behind = graph.ops[len(plain.step.graph.ops) :]
    assert graph.ops[: -len(behind)] == plain.step.graph.ops
    assert graph.tensors == plain.step.graph.tensors
    assert {op.phase for op in behind} == {Phase.UPDATE}
    assert [op.label for op in behind] == [f"update_{name}" for name, _ in built.model.named_parameters()]
    assert len(behind) == 7
    for op in behind:
        parameter, gradient = op.inputs
        assert graph.tensors[parameter].role is Role.PARAMETER
        assert graph.tensors[gradient].gradient_of == parameter
        assert op.outputs == (parameter,)
    assert captured.step.lifetimes().peak_bytes == plain.step.lifetimes().peak_bytes
    assert all(torch.equal(before[name], value) for name, value in built.model.state_dict().items())
    assert all(p.grad is None for p in built.model.parameters())


def sgd(model):
    zoo.sgd(model, 0.1)


def with_temporaries(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_((parameter.grad * 2).sqrt().nan_to_num() * 0.1 + parameter * 0.01)


def all_at_once(model):
    with torch.no_grad():
        parameters = list(model.parameters())
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)


def clipped(model):
    with torch.no_grad():
        largest = torch.stack([p.grad.abs().max() for p in model.parameters()]).max()
        for parameter in model.parameters():
            parameter.addcdiv_(parameter.grad, largest + torch.tensor(1e-6), value=-0.1)


class _Seen(Marker):
    def __init__(self):
        self.ops = []

    def before(self, op):
        self.ops.append(op)


@pytest.mark.parametrize("update", [sgd, with_temporaries, all_at_once, clipped])
def test_its_operators_do_what_the_update_does(update):
    model = network()
    captured = captured_with(update, model)
    loss_of(model, torch.randn(5, 3)).backward()
    other = copy.deepcopy(model)
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        twin.grad = one.grad.clone()
    update(other)
    seen = _Seen()
    captured.update.run(model, seen)
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, twin)
    ops = captured.step.graph.ops
    assert seen.ops == [k for k, op in enumerate(ops) if op.phase is Phase.UPDATE]
    assert len(captured.update.targets) == len(seen.ops)
    written = {t for k in seen.ops for t in ops[k].outputs}
    roles = [captured.step.graph.tensors[t].role for t in sorted(written)]
    assert roles.count(Role.PARAMETER) == 4


def test_a_parameter_that_gets_no_gradient_is_left_alone():
    model = network()
    model[0].weight.requires_grad_(False)
    captured = captured_with(sgd, model)
    labels = [op.label for op in captured.step.graph.ops if op.phase is Phase.UPDATE]
    assert labels == ["update_0.bias", "update_2.weight", "update_2.bias"]


def fails(model):
    raise ValueError(f"no rate for {type(model).__name__}")


def test_an_update_that_cannot_be_captured_is_refused():
    with pytest.raises(
        CaptureError, match="the update cannot be captured: ValueError: no rate for Sequential"
    ):
        captured_with(fails, network())


def test_the_update_of_another_model_is_refused():
    captured = lowtide.capture(loss_of, network(), torch.randn(5, 3))
    with pytest.raises(CaptureError, match="reads no parameter"):
        captured.with_update(nn.Bilinear(2, 2, 2), sgd)
