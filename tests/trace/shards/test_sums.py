"""Sums of the gradients of parameters: one for each, as soon as its gradient is there."""

import pytest
import torch
from torch import nn

from lowtide.cost.wire import WireSpeed
from lowtide.graph import SUM, Phase
from lowtide.graph.shards import OperatorShare
from lowtide.plan.make.cheapest import cheapest
from lowtide.trace.shards.device_step import device_step
from lowtide.trace.shards.kinds import CUT_KINDS
from lowtide.trace.shards.prices import ShardPrices
from lowtide.trace.shards.ways import ShardWays
from lowtide.trace.step.capture import capture
from tests.trace.shards.devices import on_devices


class Tied(nn.Module):
    """One parameter is read through a view twice, and another one as it is and through a view."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.both = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16))
        self.last = nn.Linear(16, 8)

    def forward(self, x):
        x = self.twice(self.twice(x).relu())
        return self.last((x @ self.both).tanh() @ self.both.t())


def cut_by_batch(joint, devices):
    """Computing takes long, moving next to nothing, and views take no time."""
    seconds = {k: 1.0 for k, op in enumerate(joint.graph.ops) if op.kind != "aten.t"}
    ways = ShardWays(joint, devices, CUT_KINDS["data parallel"])
    return ways.shards(cheapest(*ShardPrices(ways, seconds, WireSpeed(1e9, 1e-6)).weighted(), 5.0).choices)


@pytest.fixture(scope="module")
def case():
    model, x = Tied().double(), torch.randn(12, 16, dtype=torch.float64)
    loss = model(x).square().mean()
    loss.backward()
    return capture(lambda net, x: net(x).square().mean(), model, x).joint, model, x, loss.detach()


def sums_of(graph):
    return [k for k, op in enumerate(graph.ops) if op.kind == SUM and op.phase is Phase.BACKWARD]


def test_one_for_each_parameter_however_often_it_is_read(case):
    joint, model, x, loss = case
    shards = cut_by_batch(joint, 3)
    steps = [device_step(joint, shards, rank, sums=True).joint.graph for rank in range(3)]
    names = [[one.tensors[one.ops[k].outputs[0]].shape for k in sums_of(one)] for one in steps]
    assert names[0] == names[1] == names[2]
    assert sorted(names[0]) == sorted(tuple(one.shape) for one in model.parameters())
    values = [*model.parameters(), x]
    known = dict(model.named_parameters())
    labels = [joint.graph.tensors[t].label for t in joint.inputs]
    values = [known[label].detach() if label in known else x for label in labels]
    for found, boxes, given in on_devices(joint, shards, values)[0]:
        assert torch.allclose(found, loss, rtol=1e-12, atol=0)
        for label, box, part in zip(labels, boxes, given, strict=True):
            if label in known:
                assert torch.allclose(part.grad, known[label].grad[box.slices()], rtol=1e-10, atol=1e-14)


def test_each_stands_behind_what_makes_its_gradient(case):
    """Nothing that does not belong to the gradient runs in between, but other sums."""
    joint, *_ = case
    graph = device_step(joint, cut_by_batch(joint, 3), 0, sums=True).joint.graph
    maker = {t: k for k, op in enumerate(graph.ops) for t in op.outputs}

    def needed(t):
        k = maker.get(t)
        return set() if k is None else {k}.union(*map(needed, graph.ops[k].inputs))

    for k in sums_of(graph):
        first = maker[graph.ops[k].inputs[0]]
        between = set(range(first + 1, k))
        views = {j for j in between if graph.tensors[graph.ops[j].outputs[0]].alias is not None}
        assert len(between - views - set(sums_of(graph))) <= 3
    last = max(k for k, op in enumerate(graph.ops) if op.kind != SUM)
    assert sum(k < last for k in sums_of(graph)) >= len(sums_of(graph)) - 2


class Twice(nn.Module):
    """A view of a view of a parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.flat = nn.Parameter(torch.randn(36))

    def forward(self, x):
        return x @ self.flat.view(6, 6).t()


@pytest.mark.parametrize("first", [None, 0])
def test_a_view_that_is_cut_is_not_one_that_all_devices_make(first):
    """What is viewed again is brought together then, and its gradient goes back to where it came from."""
    model, x = Twice().double(), torch.randn(8, 6, dtype=torch.float64)
    loss = model(x).square().mean()
    loss.backward()
    joint = capture(lambda net, x: net(x).square().mean(), model, x).joint
    whole, rows = OperatorShare((None,), (None,)), OperatorShare((0,), (None,))
    shares = {"aten.view": whole if first is None else rows, "aten.t": whole}
    ways = ShardWays(joint, 2, CUT_KINDS["data parallel"])
    given = {number: shares.get(op.kind) for number, op in ways.operators}
    choices = [
        some.index(given[k]) if given[k] else len(some) - 1
        for (k, _), some in zip(ways.operators, ways.shares, strict=True)
    ]
    inputs = [next((k for k, cut in enumerate(cuts) if cut == 0), 0) for cuts in ways.cuts]
    shards = ways.shards([*inputs, *choices])
    assert [one.cut for one in shards.operators.values()].count((0,)) == (2 if first is None else 3)
    flat = model.flat.detach()
    for found, boxes, parts in on_devices(
        joint, shards, [x if joint.graph.tensors[t].label == "x" else flat for t in joint.inputs]
    )[0]:
        assert torch.allclose(found, loss.detach(), rtol=1e-12, atol=0)
        for t, box, part in zip(joint.inputs, boxes, parts, strict=True):
            if joint.graph.tensors[t].label != "x":
                assert torch.allclose(part.grad, model.flat.grad[box.slices()], rtol=1e-10, atol=1e-14)
