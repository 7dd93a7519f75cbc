"""What a split is taken to cost, against the simulation of a Program and with the steps of devices."""

import random

import pytest
import torch
from torch import nn

from lowtide.cost.estimate import estimate
from lowtide.cost.wire import WireEnd, WireSpeed, wire_seconds
from lowtide.graph import EXCHANGE, SUM, Graph, Op, Phase, Role, Tensor
from lowtide.plan.make.cheapest import cheapest, cost_of
from lowtide.plan.program.copy_lanes import Lanes
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.trace.shards.device_step import device_step
from lowtide.trace.shards.kinds import CUT_KINDS
from lowtide.trace.shards.prices import TIMES_FORWARD, OperatorTimes, ShardPrices, step_seconds
from lowtide.trace.shards.ways import ShardWays
from lowtide.trace.step.capture import capture
from tests.execute.shards.test_tried import DEVICE


def as_program(times):
    """The same as a step: what forward and backward wait for are exchanges, what goes on beside are sums."""
    tensors, ops, seconds, wire = [Tensor("x", 8, Role.INPUT)], [], [], {}
    value = 0

    def add(kind, phase, computing, talking=None):
        nonlocal value
        summed = {"gradient_of": 0} if kind == SUM else {}
        tensors.append(Tensor(f"t{len(tensors)}", 8, **summed))
        ops.append(Op(f"op{len(ops)}", kind, phase, (value,), (len(tensors) - 1,)))
        seconds.append(computing)
        if talking is not None:
            wire[len(ops) - 1] = talking
        if kind != SUM:  # nobody reads a sum
            value = len(tensors) - 1

    for one in times:
        add("f", Phase.FORWARD, one.computing / TIMES_FORWARD)
        add(EXCHANGE, Phase.FORWARD, 0.0, one.forward)
    for one in reversed(times):
        if one.backward:
            add(EXCHANGE, Phase.BACKWARD, 0.0, one.backward)
        add("b", Phase.BACKWARD, one.computing * (1 - 1 / TIMES_FORWARD))
        if one.gradients:
            add(SUM, Phase.BACKWARD, 0.0, one.gradients)
    return Graph(tuple(tensors), tuple(ops)), tuple(seconds), wire


@pytest.mark.parametrize("seed", range(60))
def test_a_step_takes_what_its_program_would(seed):
    draw = random.Random(seed)

    def drawn():
        return draw.choice([0.0, 0.0, draw.random(), 5 * draw.random()])

    times = [OperatorTimes(drawn(), drawn(), drawn(), drawn()) for _ in range(draw.randint(0, 8))]
    graph, seconds, wire = as_program(times)
    found = simulate(graph, store_all(graph), seconds=seconds, lanes=Lanes(graph, None, wire))
    assert step_seconds(times) == pytest.approx(sum(found.seconds))
    computing, talking = (sum(getattr(one, name) for one in times) for name in ("computing", "talking"))
    waits = sum(one.forward + one.backward for one in times)
    assert max(computing + waits, talking) <= step_seconds(times) + 1e-9 <= computing + talking + 2e-9


@pytest.fixture(scope="module")
def joint():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)]
    return capture(lambda net, x: net(x).square().mean(), nn.Sequential(*layers), torch.randn(32, 64)).joint


def priced(joint, link):
    """Cut by the batch, wherever that is possible."""
    seconds = {k: 1e-2 for k, op in enumerate(joint.graph.ops) if op.kind != "aten.t"}
    ways = ShardWays(joint, 4, CUT_KINDS["data parallel"])
    prices = ShardPrices(ways, seconds, link)
    return prices, cheapest(*prices.weighted(0.9, 0.1), 5.0).choices


def test_times_add_up_to_what_choices_cost(joint):
    prices, choices = priced(joint, WireSpeed(1e8, 1e-5))
    times = prices.times(choices)
    for computing, gradients in ((1.0, 1.0), (1.0, 0.0), (0.3, 0.7)):
        parts = [
            computing * one.computing + one.forward + one.backward + gradients * one.gradients
            for one in times
        ]
        assert cost_of(choices, *prices.weighted(computing, gradients)) == pytest.approx(sum(parts))
    assert prices.seconds(choices) == step_seconds(times) < cost_of(choices, *prices.weighted())


def test_gradients_of_parameters_are_the_sums_that_go_on_beside_backward(joint):
    """Views of parameters are in between; what they are priced at is what the step of a device has."""
    link = WireSpeed(1e8, 1e-5)
    prices, choices = priced(joint, link)
    own = device_step(joint, prices.ways.shards(choices), 0, sums=True).joint.graph
    ends = {str(op.arguments[-1]): WireEnd(link, 0, 4) for op in own.ops if op.kind in (EXCHANGE, SUM)}
    wire = wire_seconds(own, ends)
    sums = [k for k in wire if own.ops[k].phase is Phase.BACKWARD]
    assert sum(one.gradients for one in prices.times(choices)) == pytest.approx(sum(wire[k] for k in sums))
    seconds = [one.seconds.value if one.seconds else 0.0 for one in estimate(own, DEVICE)]
    lanes = Lanes(own, None, wire)
    took = sum(simulate(own, store_all(own), seconds=seconds, lanes=lanes).seconds)
    hidden = sum(seconds) + sum(wire.values()) - took
    assert hidden > 0.5 * min(sum(seconds[sums[0] :]), sum(wire[k] for k in sums))
