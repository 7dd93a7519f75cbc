"""A step on several devices gives the loss, the gradients and the buffers of one."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.cost.wire import WireSpeed
from lowtide.errors import CaptureError
from lowtide.graph import Rect
from lowtide.graph.shards import Mesh, OperatorShare, Shards, box_of
from lowtide.plan.check.communication import check_communication, communications
from lowtide.plan.make.cheapest import cheapest
from lowtide.plan.program.simple import store_all
from lowtide.trace.shards.device_step import device_step
from lowtide.trace.shards.kinds import CUT_KINDS
from lowtide.trace.shards.local import local_step
from lowtide.trace.shards.prices import ShardPrices
from lowtide.trace.shards.ways import ShardWays
from lowtide.trace.step.capture import capture
from lowtide.zoo import locallyconnected
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


class Frozen(nn.Module):
    """A bias without gradients, which one device adds, and two images that one device each reads."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.layer.requires_grad_(requires_grad=False)

    def forward(self, one, other):
        return self.layer(self.first(torch.cat([one, other])).tanh()).relu()


class Spectral(nn.Module):
    """Complex numbers, norms of a batch and of an image, and statistics that stay as they are."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4)
        self.free = nn.BatchNorm2d(4, track_running_stats=False)
        self.register_buffer("mean", torch.arange(4.0))
        self.register_buffer("variance", torch.arange(4.0) + 1)

    def forward(self, x):
        x = self.free(self.norm(self.first(x)).exp())
        x = torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape[2:])
        return nn.functional.batch_norm(x, self.mean, self.variance).tanh()


class Overwritten(nn.Module):
    """Values that are written over while gradients are switched off: their gradients go on."""

    def __init__(self, part=False):
        super().__init__()
        self.layer, self.part = nn.Linear(12, 6), part

    def forward(self, x):
        y = self.layer(x) * torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], dtype=x.dtype)
        with torch.no_grad():
            scale = torch.ones_like(y)
            scale[:, 1:3].mul_(2)  # of what has no gradients, any part
            (y[:, :2] if self.part else y).clamp_(min=0.1)
        return y * scale * nn.functional.cosine_similarity(self.layer(x), y).unsqueeze(1)


class Replaced(nn.Module):
    """The first row of a batch, or rows of images, which are all that one device has, are replaced by numbers."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.number = rows, nn.Parameter(torch.tensor(0.5))
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        y = self.last(self.first(x).tanh())
        if self.rows:
            y[:, :, 1:5] = y[:, :, :4].detach() + self.number
        else:
            y[0] = self.number
        return y


class Counted(nn.Module):
    """Two sums over the batch, of which each device keeps one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("hits", torch.zeros(2))

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            self.hits.copy_(torch.stack([(y > 0).sum(), (y > 0.5).sum()]).to(y.dtype))
        return y


def lengths(model, x):
    return model(x).abs().mean()


def classified(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def own(_):
    torch.manual_seed(0)
    return Normalized(), [torch.randn(5, 3, 23, 19), torch.randint(0, 4, (5,))], classified


def prefixed(_):
    torch.manual_seed(0)
    return Prefixed(), [torch.randn(8, 6), torch.randint(0, 4, (8,))], classified


def replaced(name):
    torch.manual_seed(0)
    return Replaced(name == "replaced rows"), [torch.randn(3, 3, 7, 6)], lengths


def counted(_):
    torch.manual_seed(0)
    return Counted(), [torch.randn(8, 6)], lengths


def frozen(_):
    torch.manual_seed(0)
    return Frozen(), [torch.randn(4, 3, 7, 6), torch.randn(4, 3, 7, 6)], lambda m, x, y: m(x, y).mean()


def spectral(_):
    torch.manual_seed(0)
    return Spectral(), [torch.randn(4, 3, 12, 10)], lengths


def overwritten(name):
    torch.manual_seed(0)
    return Overwritten(name == "overwritten in part"), [torch.randn(8, 12)], lengths


def of_zoo(address):
    with mock.patch.object(locallyconnected, "KERNELS", (3, 2)):  # an operator or two for each of 130 places
        built = zoo.build(address)
    return built.model, built.batch, built.loss


CASES = {
    "own": own,
    "prefixed": prefixed,
    "spectral": spectral,
    "counted": counted,
    "frozen": frozen,
    "replaced": replaced,
    "replaced rows": replaced,
    "overwritten": overwritten,
    "overwritten in part": overwritten,
    "convpool": of_zoo,
    "unet:base=2,batch=3,size=188": of_zoo,
    "alexnet:batch=3,size=67": of_zoo,
    "resnet50:batch=2,size=64,classes=10,width=16": of_zoo,
    "locallyconnected:batch=8,size=17,channels=8,classes=10": of_zoo,
    "gpt2:batch=3,layers=1,width=24,heads=3,length=10,vocab=31": of_zoo,
    "gpt2:batch=8,layers=2,width=32,heads=8,length=16,vocab=41": of_zoo,
}


class Captured:
    def __init__(self, address, *, double=True):
        self.model, batch, loss = CASES[address](address)
        if double:
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
        known.setdefault(address, None) or known.update({address: Captured(address)}) or known[address]
    )


def split(case, devices, kind="any"):
    """As much as can be: computing takes long, and moving next to nothing."""
    seconds = dict.fromkeys(range(len(case.joint.graph.ops)), 1.0)
    ways = ShardWays(case.joint, devices, CUT_KINDS[kind])
    found = cheapest(*ShardPrices(ways, seconds, WireSpeed(1e12, 0.0)).weighted(), 5.0)
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
            if whole is not None and whole.grad is not None:
                assert part.grad is not None
                assert relative(part.grad, whole.grad[box.slices()], least) < 1e-10
            elif whole is not None:  # a buffer
                assert torch.allclose(part, whole[box.slices()], rtol=1e-12, atol=1e-12)
    return wires


def everybody_comes(case, shards, wires):
    """What devices send and wait for once their steps are captured, where what nobody reads is left out."""
    mesh, lists = shards.mesh, []
    for rank in range(mesh.devices):
        graph = device_step(case.joint, shards, rank, sums=True).joint.graph
        axes = range(len(mesh.sizes))
        lines = {f"shape of rank {rank}, axis {axis}": mesh.line(rank, axis) for axis in axes}
        lists.append(communications(graph, store_all(graph), rank, lines))
        sent = sum(one.sent_bytes for one in lists[-1])
        assert sent == sum(wires[rank, axis].sent_bytes for axis in axes)
    check_communication(lists)
    return lists


IMAGES = ["any", "batch", "channels", "height", "width", "inner"]
TOKENS = ["any", "batch", "tokens", "features", "heads", "inner"]
UNET, ALEXNET, RESNET, LOCAL, GPT2, LARGER = list(CASES)[-6:]
QUICK = [
    *(("own", 3, kind) for kind in IMAGES),
    *((GPT2, 3, kind) for kind in TOKENS),
    ("convpool", 3, "height"),
    (UNET, 2, "width"),
    (ALEXNET, 3, "channels"),
    (LOCAL, 2, "any"),
    ("counted", 2, "any"),
]
EXTENDED = [
    *((address, devices, kind) for address in (UNET, ALEXNET, RESNET, LOCAL) for devices in (2, 3, 4, 8) for kind in IMAGES),
    *((LARGER, devices, kind) for devices in (2, 3, 4, 8) for kind in TOKENS),
]  # fmt: skip

SINGLE = [
    pytest.param(*one, marks=pytest.mark.extended) for one in EXTENDED if one[0] != RESNET or one[2] == "any"
]
"""In float32, values next to 0 of a ReLU go either way in ResNet-50, by the order of sums, on one device too."""


@pytest.mark.parametrize(("address", "devices", "kind"), QUICK)
def test_every_kind_of_cut(address, devices, kind, captured):
    case = captured(address)
    shards = split(case, devices, kind)
    assert shards.operators
    everybody_comes(case, shards, compared(case, shards))


@pytest.mark.extended
@pytest.mark.parametrize(("address", "devices", "kind"), EXTENDED)
def test_every_network_and_every_cut(address, devices, kind, captured):
    case = captured(address)
    shards = split(case, devices, kind)
    wires = compared(case, shards)
    if devices <= 3:  # more take long to capture
        everybody_comes(case, shards, wires)


def rounded_otherwise(address, seed, labels):
    """Gradients of one device whose parameters differ by a rounding: in ResNet-50 some ReLUs switch by that."""
    model, batch, loss = CASES[address](address)
    for module in model.eval().modules():
        module.train(isinstance(module, nn.BatchNorm2d))
    draw = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        value.data *= 1 + 2**-23 * torch.randn(value.shape, generator=draw)
    loss(model, *batch).backward()
    found = dict(model.named_parameters())
    return [found.get(label) for label in labels]


def apart(part, wide, box, least):
    """How far a gradient is from that in float64, as a share of its norm."""
    return float((part.double() - wide.grad[box.slices()]).norm()) / (float(wide.grad.norm()) + least)


@pytest.mark.parametrize(("address", "devices", "kind"), [("own", 3, "any"), (GPT2, 3, "features"), *SINGLE])
def test_float32_is_as_close_to_float64_as_one_device(address, devices, kind, captured):
    """Gradients are as far from those in float64 as those of one device in float32, three times that at most."""
    single, wide = Captured(address, double=False), captured(address)
    trained = [k for k, one in enumerate(wide.after) if one is not None and one.grad is not None]
    least = 1e-4 * max(float(wide.after[k].grad.norm()) for k in trained)
    found, _ = on_devices(single.joint, split(single, devices, kind), single.values)
    labels = [single.joint.graph.tensors[t].label for t in single.joint.inputs]
    alone = [single.after, *(rounded_otherwise(address, k, labels) for k in range(6 * (address == RESNET)))]
    whole = {k: Rect.of_shape(wide.after[k].shape) for k in trained}
    one = max(apart(some[k].grad, wide.after[k], whole[k], least) for some in alone for k in trained)
    for loss, boxes, given in found:
        far = max(apart(given[k].grad, wide.after[k], boxes[k], least) for k in trained)
        assert far <= 3 * one + 1e-6
        limit = 3 * abs(float(single.loss.double() - wide.loss)) + 1e-6 * abs(float(wide.loss))
        assert abs(float(loss.double() - wide.loss)) <= limit


@pytest.mark.extended
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("address", [UNET, ALEXNET, RESNET, LOCAL, LARGER])
def test_what_is_split_of_every_network_is_split_evenly(address, devices, captured):
    """The device with most holds at most 1.15 times its share of all that is split."""
    case = captured(address)
    graph, shards = case.joint.graph, split(case, devices)
    cuts = {t: cut for t, cut in shards.leaves.items() if cut != (None,)}
    for k, share in shards.operators.items():
        cuts |= {t: share.cut for t in graph.ops[k].outputs[:1] if share.cut != (None,)}
    shapes = {t: graph.tensors[t].shape for t in cuts}
    held = [
        sum(box_of(shapes[t], cut, shards.mesh, rank).size for t, cut in cuts.items())
        for rank in range(devices)
    ]
    assert max(held) <= 1.15 / devices * sum(Rect.of_shape(shape).size for shape in shapes.values())


def test_sums_over_inner_dimensions_are_added_up_or_scattered(captured):
    """Every product and convolution as parts of a sum, whose results are whole, and cut."""
    case = captured("own")
    ops = [k for k, op in enumerate(case.joint.graph.ops) if op.kind in ("aten.convolution", "aten.addmm")]
    forward = [k for k in ops if case.joint.graph.ops[k].phase.value == "forward"]
    for cut in (None, 0, 1):
        shares = {k: OperatorShare((cut,), (0,)) for k in forward}
        assert len(shares) == 3
        compared(case, Shards(Mesh((3,)), {}, shares))


def test_batch_norm_by_channels_has_its_statistics_cut(captured):
    case = captured("own")
    shards = split(case, 3, "channels")
    norm = next(k for k, op in enumerate(case.joint.graph.ops) if "batch_norm" in op.kind)
    assert shards.operators[norm].cut == (1,)
    kept = [t for t in shards.leaves if "running" in case.joint.graph.tensors[t].label]
    assert [shards.leaves[t] for t in kept] == [(0,), (0,)]
    whole = {t: (None,) if t in kept else cut for t, cut in shards.leaves.items()}
    with pytest.raises(CaptureError, match="running statistics are cut where channels are"):
        local_step(case.joint, Shards(shards.mesh, whole, shards.operators), 0, ["none"])


def test_a_parameter_that_one_device_does_not_read(captured):
    case = captured("prefixed")
    shards = split(case, 4, "batch")
    cat = next(k for k, op in enumerate(case.joint.graph.ops) if op.kind == "aten.cat")
    assert shards.operators[cat].cut == (0,)
    whole = dict.fromkeys(case.joint.inputs, (None,))  # all devices hold the parameter
    compared(case, Shards(shards.mesh, whole, shards.operators))


def test_what_one_device_does_not_read_is_part_of_its_step():
    """A bias without gradients is added by one device, and held by both: what nobody reads would not count."""
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4)).requires_grad_(requires_grad=False)
    model[0].weight.requires_grad_()
    case = SimpleNamespace(joint=capture(lambda model, x: model(x).sum(), model, torch.randn(3, 6)).joint)
    shards = split(case, 2, "inner")
    products = [k for k, op in enumerate(case.joint.graph.ops) if op.kind == "aten.addmm"]
    assert [shards.operators[k].over for k in products] == [(0,)] * 2
    for rank in range(2):
        graph = local_step(case.joint, shards, rank, ["none"]).module.graph
        assert all(node.users for node in graph.find_nodes(op="placeholder"))


@pytest.mark.parametrize("kind", ["batch", "height", "any"])
@pytest.mark.parametrize("name", ["replaced", "replaced rows"])
def test_a_device_whose_part_is_replaced(name, kind, captured):
    """Its gradients are zeros, and it takes part in sums all the same."""
    case = captured(name)
    shards = split(case, 3, kind)
    wires = compared(case, shards)
    planned = [device_step(case.joint, shards, rank).wire_bytes for rank in range(3)]
    assert planned == [wires[rank, 0].sent_bytes for rank in range(3)]


@pytest.mark.parametrize("over", [None, 0])
def test_what_a_device_sends_and_does_not_read_itself(over, captured):
    """Others wait for it: a piece of a batch, and of a bias that one device adds to a sum."""
    case = captured("frozen")
    graph = case.joint.graph
    labels = {graph.tensors[t].label: t for t in case.joint.inputs}
    leaves = {labels["x"]: (0,), labels["y"]: (0,), labels["layer.bias"]: (0,)}
    forward = [k for k, op in enumerate(graph.ops) if op.phase.value == "forward" and op.kind != "aten.mean"]
    shares = {k: OperatorShare((0,), (None,)) for k in forward}
    if over is not None:
        last = next(k for k in forward if graph.ops[k].label == "layer")
        shares[last] = OperatorShare((0,), (over,))
    shards = Shards(Mesh((2,)), leaves, shares)
    wires = compared(case, shards)
    planned = [device_step(case.joint, shards, rank).wire_bytes for rank in range(2)]
    assert planned == [wires[rank, 0].sent_bytes for rank in range(2)]
    assert min(planned) > 0


@pytest.mark.parametrize("kind", ["batch", "channels", "height", "any"])
def test_complex_numbers_and_every_sort_of_statistics(kind, captured):
    compared(captured("spectral"), split(captured("spectral"), 2, kind))


@pytest.mark.parametrize("kind", ["batch", "features", "any"])
def test_what_is_written_over_without_gradients_has_them_still(kind, captured):
    compared(captured("overwritten"), split(captured("overwritten"), 3, kind))


def test_a_part_that_is_written_over_without_gradients_is_refused(captured):
    with pytest.raises(CaptureError, match=r"test_local.py:\d+: what is written over a part .* of its own"):
        compared(captured("overwritten in part"), split(captured("overwritten in part"), 2, "batch"))


def test_two_axes(captured):
    """Rows of the batch along one axis, and of the image along the other: corners of halos come along."""
    case = captured("own")
    one, two = split(case, 2, "batch"), split(case, 2, "height")
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
