"""Splits inside a budget for each device, and what they are predicted to take."""

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.cost.device import Device, Environment
from lowtide.cost.estimate import estimate
from lowtide.cost.wire import WireSpeed
from lowtide.errors import PlanError
from lowtide.execute.shards import tried
from lowtide.execute.shards.tried import FREE, Chooser, choose
from lowtide.graph import Role
from lowtide.graph.shards import box_of
from lowtide.plan.make.make_plan import plain_peak
from lowtide.plan.program.costs import Costs
from lowtide.trace.shards.device_step import device_step, likeness
from lowtide.trace.step.capture import capture
from tests.trace.shards.devices import on_devices

DEVICE = Device(Environment("a device", "cpu"), {"float32": 1e10}, 1e10, 1e-6, 1 << 34)


def small():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16 * 16, 32))
    batch = [torch.randn(8, 3, 32, 32), torch.randn(8, 32)]
    return model, batch, lambda net, x, y: (net(x) - y).square().mean()


class _Case:
    def __init__(self, model, batch, loss):
        self.model, self.batch = model, batch
        self.joint = capture(loss, model, *batch).joint


@pytest.fixture(scope="module")
def case():
    return _Case(*small())


def chosen(joint, devices, budget=None, **options):
    """Without a budget the search ends once it has proven its result, however slow the machine is."""
    limit = 60.0 if budget is None else 0.5
    return choose(Chooser(joint, devices, DEVICE, WireSpeed(1e10, 1e-6), budget, limit), **options)


@pytest.mark.extended
def test_a_budget_is_kept_and_others_are_compared(case):
    free = chosen(case.joint, 2)
    assert free.bound <= free.best.seconds <= 1.05 * free.bound
    assert 0 <= free.gap < 0.05
    budget = int(0.92 * free.best.peak_bytes)
    found = chosen(case.joint, 2, budget, compare=True)
    assert found.best.peak_bytes <= budget < found.best.plain_bytes
    assert found.bound <= found.best.seconds
    assert found.best.seconds >= free.best.seconds
    assert [one.name for one in found.others[:2]] == ["data parallel", "fully sharded"]
    assert found.others[2].name.endswith("alone")
    for one in found.others:
        assert not one.fits or found.best.seconds <= one.seconds + 1e-9
    assert found.others[1].plain_bytes < found.others[0].plain_bytes  # parameters are cut


def test_one_dimension_alone_may_be_features_or_heads():
    """Of a sequence: a long product of few rows is split by its features best, with sums over them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    joint = capture(lambda net, x: net(x).square().mean(), model, torch.randn(1, 3, 256)).joint
    found = chosen(joint, 4, compare=True)
    assert found.others[2].name == "heads alone"
    assert found.others[2].seconds < found.others[0].seconds


def test_a_budget_that_nothing_fits_is_refused_with_one_that_works(case):
    with pytest.raises(PlanError, match="the smallest budget of a device that is known to work is") as caught:
        chosen(case.joint, 2, 100_000)
    known = int(str(caught.value).rpartition("(")[2].split()[0])
    assert chosen(case.joint, 2, known).best.peak_bytes <= known


@pytest.mark.extended
def test_a_budget_for_each_device_of_a_unet():
    built = zoo.build("unet:base=4,batch=4,size=188")
    test_a_budget_is_kept_and_others_are_compared(_Case(built.model, built.batch, built.loss))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_what_is_split_is_split_evenly(devices, case):
    """The device with most holds at most 1.15 times its share of all that is split."""
    graph, shards = case.joint.graph, chosen(case.joint, devices).best.shards
    split = {t: cut for t, cut in shards.leaves.items() if cut[0] is not None}
    for k, share in shards.operators.items():
        if share.cut[0] is not None:
            split[graph.ops[k].outputs[0]] = share.cut
    held = [
        sum(box_of(graph.tensors[t].shape, cut, shards.mesh, rank).size for t, cut in split.items())
        for rank in range(devices)
    ]
    whole = sum(box_of(graph.tensors[t].shape, (None,), shards.mesh, 0).size for t in split)
    assert max(held) <= 1.15 / devices * whole


def test_bytes_on_the_wire_are_those_that_are_sent(case):
    joint = case.joint
    shards = chosen(joint, 3).best.shards
    known, batch = dict(case.model.named_parameters()), iter(case.batch)
    labels = [joint.graph.tensors[t] for t in joint.inputs]
    values = [next(batch) if one.role is Role.INPUT else known[one.label].detach() for one in labels]
    _, wires = on_devices(joint, shards, values)
    planned = [device_step(joint, shards, rank).wire_bytes for rank in range(3)]
    assert [wires[rank, 0].sent_bytes for rank in range(3)] == planned
    assert min(planned) > 0


def test_what_a_device_holds_of_parameters_is_its_part():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    joint = capture(lambda net, x: net(x).square().mean(), model, torch.randn(4, 64)).joint
    found = chosen(joint, 4)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert found.best.plain_bytes < 2 * 1.15 * whole / 4 + 4 * 8 * 4 * 512


@pytest.mark.parametrize(("kind", "count", "different"), [
    ("batch", 4, 1), ("height", 4, 3), ("height", 8, 3), ("batch", 3, 3), ("any", 3, None),
])  # fmt: skip
def test_devices_that_are_alike_are_looked_at_once(case, kind, count, different, monkeypatch):
    """They take the same time and memory, and send as much."""
    found = choose(Chooser(case.joint, count, DEVICE, FREE, None, 0.5, forced=True), kind).best
    known = {}
    for rank in range(count):
        one = device_step(case.joint, found.shards, rank)
        costs = Costs(tuple(c.seconds.value if c.seconds else 0.0 for c in estimate(one.joint.graph, DEVICE)))
        facts = plain_peak(one.joint.graph, costs), costs.seconds, one.wire_bytes, one.messages
        like = likeness(case.joint, found.shards, rank)
        assert known.setdefault(like, facts) == facts
    looked = []

    def counted(*given):
        looked.append(given[-1])
        return device_step(*given)

    monkeypatch.setattr(tried, "device_step", counted)
    again = Chooser(case.joint, count, DEVICE, FREE, None, 0.5).looked_at(kind, found.shards, 1.0, 1.0)
    assert len(looked) == len(known)
    assert len(known) == (different or len(known))
    assert again.plain_bytes == max(one[0] for one in known.values())
    assert again.wire_bytes == max(one[2] for one in known.values())
