"""A step on several devices gives the loss, the gradients and the buffers of one."""

import copy

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.errors import CaptureError
from lowtide.graph.shards import Mesh, OperatorShare, Shards
from lowtide.plan.make.cheapest import cheapest
from lowtide.trace.shards.local import local_step
from lowtide.trace.shards.ways import ShardWays, WireSpeed
from lowtide.trace.step.capture import capture
from tests.trace.shards.devices import doubled, on_devices, relative


class Normalized(nn.Module):
    """Strides, dilation, pooling, a BatchNorm in training, and sizes that do not divide."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 6, 3, dilation=2, padding=2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        x = self.pool(self.second(self.norm(self.first(x)).relu()).relu())
        return self.last(x.mean((2, 3)))


class Prefixed(nn.Module):
    """A parameter in front of the rows of the batch: not every device reads it."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Parameter(torch.ones(2, 6)), nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(torch.cat([self.first, x])).square()[: len(x)]


def classified(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def own(_):
    torch.manual_seed(0)
    return Normalized(), [torch.randn(5, 3, 23, 19), torch.randint(0, 4, (5,))], classified


def prefixed(_):
    torch.manual_seed(0)
    return Prefixed(), [torch.randn(8, 6), torch.randint(0, 4, (8,))], classified


def of_zoo(address):
    built = zoo.build(address)
    return built.model, built.batch, built.loss


CASES = {
    "own": own,
    "prefixed": prefixed,
    "convpool": of_zoo,
    "unet:base=2,batch=3,size=188": of_zoo,
    "alexnet:batch=3,size=67": of_zoo,
    "gpt2:batch=3,layers=1,width=24,heads=3,length=10,vocab=31": of_zoo,
}


class _Captured:
    def __init__(self, address):
        self.model, batch, loss = CASES[address](address)
        self.model, batch = self.model.double(), doubled(batch)
        for module in self.model.eval().modules():  # no dropout: threads draw from one generator
            module.train(isinstance(module, nn.BatchNorm2d))
        self.joint = capture(loss, self.model, *batch).joint
        twin = copy.deepcopy(self.model)
        known = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        others = iter(batch)
        labels = [self.joint.graph.tensors[t].label for t in self.joint.inputs]
        self.values = [known[name] if name in known else next(others) for name in labels]
        self.values = [value.detach().clone() for value in self.values]
        torch.manual_seed(7)
        self.loss = loss(twin, *batch)
        self.loss.backward()
        after = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
        self.after = [after.get(name) for name in labels]


@pytest.fixture(scope="module")
def captured():
    known = {}
    return lambda address: (
        known.setdefault(address, None) or known.update({address: _Captured(address)}) or known[address]
    )


def split(case, devices, dims=None):
    """As much as can be: computing takes long, and moving next to nothing."""
    seconds = dict.fromkeys(range(len(case.joint.graph.ops)), 1.0)
    ways = ShardWays(case.joint, devices, seconds, WireSpeed(1e12, 0.0), dims)
    found = cheapest(ways.alone, ways.pairs, 5.0)
    assert found.bound <= found.cost + 1e-6
    return ways.shards(found.choices)


def compared(case, shards):
    torch.manual_seed(7)
    found, wires = on_devices(case.joint, shards, case.values)
    least = 1e-4 * max(
        float(one.grad.norm()) for one in case.after if one is not None and one.grad is not None
    )
    for loss, boxes, given in found:
        assert torch.allclose(loss, case.loss.detach(), rtol=1e-12, atol=0)
        for box, part, whole in zip(boxes, given, case.after, strict=True):
            if part.grad is not None:
                assert relative(part.grad, whole.grad[box.slices()], least) < 1e-10
            elif whole is not None:  # a buffer
                assert torch.allclose(part, whole[box.slices()], rtol=1e-12, atol=1e-12)
    return wires


@pytest.mark.parametrize(
    "dims", [(0,), (2,), (3,), (1,), None], ids=["batch", "height", "width", "channels", "any"]
)
@pytest.mark.parametrize(
    "address", ["own", "convpool", "unet:base=2,batch=3,size=188", "alexnet:batch=3,size=67"]
)
def test_images(address, dims, captured):
    case = captured(address)
    shards = split(case, 2 if dims is None else 3, dims)
    compared(case, shards)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), None], ids=["batch", "tokens", "features", "any"])
def test_tokens(dims, captured):
    case = captured("gpt2:batch=3,layers=1,width=24,heads=3,length=10,vocab=31")
    compared(case, split(case, 3, dims))


def test_a_parameter_that_one_device_does_not_read(captured):
    case = captured("prefixed")
    shards = split(case, 4, (0,))
    cat = next(k for k, op in enumerate(case.joint.graph.ops) if op.kind == "aten.cat")
    assert shards.operators[cat].cut == (0,)
    whole = dict.fromkeys(case.joint.inputs, (None,))  # all devices hold the parameter
    compared(case, Shards(shards.mesh, whole, shards.operators))


def test_two_axes(captured):
    """Rows of the batch along one axis, and of the image along the other: corners of halos come along."""
    case = captured("own")
    one, two = split(case, 2, (0,)), split(case, 2, (2,))
    none = OperatorShare((None,), (None,))
    shares = {
        k: OperatorShare((a.cut[0], b.cut[0]), (a.over[0], b.over[0]))
        for k in one.operators.keys() | two.operators.keys()
        for a, b in [(one.operators.get(k, none), two.operators.get(k, none))]
    }
    leaves = {t: (one.leaves[t][0], two.leaves[t][0]) for t in one.leaves}
    compared(case, Shards(Mesh((2, 2)), leaves, shares))


def test_what_cannot_be_split_is_named(captured):
    case = captured("own")
    number = next(k for k, op in enumerate(case.joint.graph.ops) if op.kind == "aten.add_")
    shards = Shards(Mesh((2,)), {}, {number: OperatorShare((0,), (None,))})
    with pytest.raises(CaptureError, match="add_ cannot be split; each device has to run all of it"):
        local_step(case.joint, shards, 0, ["none"])
