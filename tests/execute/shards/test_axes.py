"""Meshes of several axes, planned axis by axis: results are those of one device, predictions as expected."""

import math

import pytest
import torch
from torch import nn

from lowtide.cost.wire import WireSpeed
from lowtide.errors import PlanError
from lowtide.execute.planning.step_costs import described
from lowtide.execute.shards import axes
from lowtide.execute.shards.axes import Prices, axes_of, split_axes
from lowtide.execute.shards.choose import choose_on_mesh
from lowtide.execute.shards.tried import Chooser
from lowtide.graph import Role
from lowtide.graph.shards import Mesh
from lowtide.plan.make.cheapest import cheapest, cost_of
from lowtide.trace.shards.device_step import device_step
from lowtide.trace.shards.kinds import CUT_KINDS
from lowtide.trace.shards.prices import ShardPrices
from lowtide.trace.shards.ways import ShardWays
from lowtide.trace.step.capture import capture
from tests.trace.shards.test_local import GPT2, RESNET, UNET, Captured, compared


@pytest.mark.parametrize("devices", [1, 2, 6, 7, 8, 13, 64, 96, 1000, 1024])
def test_axes_make_up_the_devices(devices):
    sizes = axes_of(devices)
    assert math.prod(sizes) == devices
    assert all(size > 1 for size in sizes) or devices == 1


def split(case, sizes, kind="any"):
    seconds = dict.fromkeys(range(len(case.joint.graph.ops)), 1.0)
    links = [WireSpeed(1e12, 0.0)] * len(sizes)
    return split_axes(case.joint, Mesh(sizes), seconds, links, CUT_KINDS[kind], 10.0)


@pytest.mark.parametrize(("address", "sizes"), [("own", (2, 2)), (GPT2, (3, 2))])
def test_results_are_those_of_one_device(address, sizes):
    case = Captured(address)
    found = split(case, sizes)
    both = [k for k, share in found.shards.operators.items() if share.shared(0) and share.shared(1)]
    assert both
    compared(case, found.shards)


LINKS = [WireSpeed(1e8, 1e-4), WireSpeed(1e10, 1e-6)]


def chosen(case, budget=None, kind="any", links=LINKS, **options):
    chooser = Chooser(case.joint, 4, described("cpu"), links[0], budget, 2.0, forced=kind != "any")
    return choose_on_mesh(chooser, Mesh((2, 2)), links, kind, **options)


@pytest.fixture(scope="module")
def own():
    """A network and how its step is split over two axes, beside other ways."""
    case = Captured("own")
    return case, chosen(case, compare=True)


def test_others_are_compared_on_several_axes(own):
    case, found = own
    assert [one.name.rpartition(" ")[2] for one in found.others] == ["parallel", "sharded", "alone"]
    assert found.best.seconds <= min(one.seconds for one in found.others)
    assert {one.shards.mesh.sizes for one in (found.best, *found.others)} == {(2, 2)}
    parallel, sharded, _ = found.others
    assert all(set(cut) == {None} for t, cut in parallel.shards.leaves.items() if parameter(case, t))
    assert any(set(cut) != {None} for t, cut in sharded.shards.leaves.items() if parameter(case, t))


def test_moving_takes_as_long_as_links_say(own):
    case, _ = own
    quick, slow = (
        chosen(case, kind="channels"),
        chosen(case, kind="channels", links=[WireSpeed(1e6, 1e-2)] * 2),
    )
    assert quick.others == ()
    assert slow.best.seconds > quick.best.seconds


@pytest.mark.extended
def test_the_budget_counts_for_all_that_are_compared(own):
    case, found = own
    least = min(one.peak_bytes for one in found.others)
    assert chosen(case, least, compare=True).best.peak_bytes <= least


def test_a_budget_that_no_split_keeps_is_refused(own):
    with pytest.raises(PlanError, match="no split was found whose devices stay inside"):
        chosen(own[0], 1000)


def parameter(case, t):
    return case.joint.graph.tensors[t].role is not Role.INPUT


def test_what_is_cut_already_stays_so():
    """As in an evaluation, or for another batch: parameters are where they were."""
    case = Captured("own")
    first = split(case, (2, 2), "channels")
    held = {
        t: cut for t, cut in first.shards.leaves.items() if case.joint.graph.tensors[t].role is not Role.INPUT
    }
    assert any(any(d is not None for d in cut) for cut in held.values())
    seconds, links = dict.fromkeys(range(len(case.joint.graph.ops)), 1.0), [WireSpeed(1e12, 0.0)] * 2
    again = split_axes(case.joint, Mesh((2, 2)), seconds, links, CUT_KINDS["any"], 10.0, held)
    assert {t: again.shards.leaves[t] for t in held} == held
    compared(case, again.shards)


def test_the_cost_of_a_split_is_known_without_that_of_others():
    """The same as among all choices, of which it is one."""
    case = Captured("own")
    seconds = dict.fromkeys(range(len(case.joint.graph.ops)), 1.0)
    first, second = ways = [ShardWays(case.joint, 3) for _ in range(2)]
    prices = [ShardPrices(one, seconds, WireSpeed(1e6, 1e-3)) for one in ways]
    found = cheapest(*prices[0].weighted(), 5.0)
    second.settle(first.shards(found.choices))
    assert {len(some) for some in (*second.cuts, *second.shares)} == {1}
    only = [0] * len(found.choices)
    assert cost_of(only, *prices[1].weighted()) == pytest.approx(found.cost, rel=1e-12)
    assert prices[1].times(only) == prices[0].times(found.choices)
    both = zip((found.choices, only), prices, strict=True)
    held = [cost_of(choices, one.held, {}) for choices, one in both]
    assert held[0] == held[1] > 0


@pytest.mark.extended
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("address", [UNET, RESNET, GPT2])
def test_results_of_larger_networks(address, sizes):
    case = Captured(address)
    compared(case, split(case, sizes).shards)


def test_traffic_of_data_parallel_grows_as_the_analysis_says():
    """Each device sends its gradients into one sum: 2 P (N - 1) / N bytes, and holds its part of the batch."""
    model = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 24))
    joint = capture(lambda net, x: net(x).square().mean(), model, torch.randn(1024, 40)).joint
    seconds = {k: 1e-6 * (op.kind != "aten.t") for k, op in enumerate(joint.graph.ops)}
    size = sum(parameter.nbytes for parameter in model.parameters())
    for devices in (8, 64, 256, 1024):
        link = [WireSpeed(1e12, 0.0)]
        found = split_axes(joint, Mesh((devices,)), seconds, link, CUT_KINDS["data parallel"])
        sent = 2 * size * (devices - 1) / devices
        if devices <= 24:  # so many rows the smallest parameter has
            cut = split_axes(joint, Mesh((devices,)), seconds, link, CUT_KINDS["fully sharded"])
            assert cut.wire_bytes == pytest.approx(sent, rel=0.02)
            assert cut.held_bytes < 1.2 * (found.held_bytes - 2 * size + 2 * size / devices)
        assert found.wire_bytes == pytest.approx(sent, rel=0.02)  # and the loss
        assert found.held_bytes >= 2 * size


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (1, 1)])
def test_an_axis_of_one_device_cuts_nothing_and_moves_nothing(own, sizes):
    case, _ = own
    found = split(case, sizes).shards
    alone = [axis for axis, size in enumerate(sizes) if size == 1]
    shares = found.operators.values()
    cuts = [*found.leaves.values(), *(one.cut for one in shares), *(one.over for one in shares)]
    assert {cut[axis] for cut in cuts for axis in alone} == {None}
    steps = [device_step(case.joint, found, rank) for rank in range(sizes[0] * sizes[1])]
    assert {one.axis for step in steps for one in step.moved}.isdisjoint(alone)
    assert bool(found.operators) == any(one.messages for one in steps) == (sizes != (1, 1))


@pytest.mark.parametrize("links", [(1e6, 1e10), (1e10, 1e6), (1e8, 1e8)])
def test_a_mesh_takes_no_longer_than_either_way_to_plan_it(own, links):
    """Nor than one whose slow axis does the same on all devices."""
    case, _ = own
    graph, mesh = case.joint.graph, Mesh((2, 3))
    seconds = {k: 1e-4 for k, op in enumerate(graph.ops) if op.kind not in ("aten.t", "aten.view")}
    speeds = [WireSpeed(rate, 1e-5) for rate in links]
    found = split_axes(case.joint, mesh, seconds, speeds)
    for prices in (Prices(speeds), Prices(speeds, beside=True)):
        other = split_axes(case.joint, mesh, seconds, speeds, prices=prices)
        assert found.seconds <= other.seconds + 1e-12
    assert max(found.compute_seconds, found.wire_seconds) <= found.seconds
    assert found.seconds <= found.compute_seconds + found.wire_seconds + 1e-12
    compared(case, found.shards)


def test_an_axis_that_makes_a_step_slower_is_left_alone(own, monkeypatch):
    """Where each axis was cut for what those before it leave."""
    case, _ = own
    seconds = {k: 1e-6 for k, _ in enumerate(case.joint.graph.ops)}
    fast, slow = WireSpeed(1e15, 0.0), WireSpeed(1e3, 1.0)
    best = split_axes(case.joint, Mesh((2,)), seconds, [fast])
    free = Prices([fast, fast])
    both = split_axes(case.joint, Mesh((2, 2)), seconds, [fast, slow], prices=free)
    assert both.seconds > 1
    monkeypatch.setattr(axes, "Prices", lambda *_, **__: free)
    found = split_axes(case.joint, Mesh((2, 2)), seconds, [fast, slow])
    assert found.seconds == pytest.approx(best.seconds, rel=1e-3)
    assert {cut[1] for cut in found.shards.leaves.values()} == {None}
