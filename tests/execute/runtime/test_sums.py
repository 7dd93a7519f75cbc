"""Sums over processes beside the computation: on their way while others run, and there before anybody looks."""

import pytest
import torch
from torch import nn

from lowtide.errors import RunError
from lowtide.execute.backend import compile_with
from lowtide.execute.calls.random_state import Drawing
from lowtide.execute.runtime.frame import Frame
from lowtide.execute.runtime.prepare import prepared
from lowtide.graph import SUM
from lowtide.plan.program.instructions import Drop, Program, Run
from lowtide.plan.program.simple import offload_all, store_all
from lowtide.trace.distributed.exchange import ADD_UP, gradient_summed
from lowtide.trace.distributed.stand_ins import StandIns
from lowtide.trace.step.capture import capture
from tests.execute.runtime.wires import NAME, looked_at


class SlowWire:
    """Two devices with the same values: the sum is twice what is there, and not there until it is asked for."""

    place = 0

    def __init__(self):
        self.events, self.under_way, self.fails = [], {}, False

    def add_up(self, x):
        self.events.append("at once")
        x.mul_(2)

    def begin_sum(self, x):
        number = sum(one.startswith("begin") for one in self.events)
        self.events.append(f"begin {number}")
        self.under_way[number] = x

        def ended():
            if self.fails:
                raise RunError("rank 1 has died")
            self.under_way.pop(number).mul_(2)
            self.events.append(f"end {number}")

        return ended


@pytest.fixture
def wire():
    with looked_at(SlowWire()) as found:
        yield found


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def summed(model, x, twice=False):
    """Gradients of all parameters are sums; so is what the loss is of, which the next operator reads."""
    for k, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            weight, bias = (gradient_summed(p, (NAME,)) for p in (layer.weight, layer.bias))
            x = nn.functional.linear(x, weight, bias)
        else:
            x = layer(x)
        if k == 1 and twice:
            x = ADD_UP(x, True, NAME)
    return x.square().sum()


def doubled(model, x):
    return summed(model, x, twice=True)


def plain(model, x, factor=2.0):
    """What two devices with the same values compute."""
    for k, layer in enumerate(model):
        x = layer(x)
        if k == 1:
            x = x + (factor - 1) * x.detach()
    return x.square().sum()


def gradients(step, model, batches=1):
    model.zero_grad()
    torch.manual_seed(5)
    for _ in range(batches):
        step(model, torch.randn(3, 8).double()).backward()
    return [p.grad.clone() for p in model.parameters()]


def compiled(function, program):
    made = []
    step = torch.compile(
        function, backend=lambda m, i: compile_with(m, i, program, made.append), fullgraph=True
    )
    return step, made


def test_later_operators_run_while_a_sum_is_on_its_way(wire):
    step, _ = compiled(summed, store_all)
    model = net()
    found = gradients(step, model)
    # each begins with a gradient that was computed since the one before began
    assert wire.events == [f"begin {k}" for k in range(6)] + [f"end {k}" for k in range(6)]
    assert not wire.under_way
    expected = gradients(lambda m, x: plain(m, x, 1.0), net())
    assert all(torch.equal(one, 2 * other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("program", [store_all, offload_all])
def test_who_reads_or_sends_a_sum_waits_for_it(wire, program):
    step, made = compiled(doubled, program)
    model = net()
    found = gradients(step, model)
    assert wire.events[:2] == ["begin 0", "end 0"]
    expected = gradients(plain, net())
    assert all(torch.allclose(a, 2 * b, rtol=1e-14) for a, b in zip(found, expected, strict=True))
    assert any(op.kind == SUM and op.phase.value == "forward" for op in made[0].joint.graph.ops)


def test_gradients_of_two_backwards_are_added_up(wire):
    step, _ = compiled(summed, store_all)
    found = gradients(step, net(), batches=2)
    expected = gradients(lambda m, x: plain(m, x, 1.0), net(), batches=2)
    assert all(torch.equal(one, 2 * other) for one, other in zip(found, expected, strict=True))


def test_without_gradients_forward_ends_with_its_sums_there(wire):
    step, _ = compiled(lambda model, x: ADD_UP(summed(model, x), True, NAME), store_all)
    model, x = net(), torch.randn(3, 8).double()
    with torch.no_grad():
        assert torch.equal(step(model, x), 2 * plain(model, x, 1.0))
    assert wire.events == ["begin 0", "end 0"]


def test_memory_is_not_given_back_before_the_sum_is_there(wire):
    joint = capture(doubled, net(), torch.randn(3, 8).double()).joint
    op = next(k for k, one in enumerate(joint.graph.ops) if one.kind == SUM)
    ((source,), (result,)) = joint.graph.ops[op].inputs, joint.graph.ops[op].outputs
    lines, _ = prepared(joint, Program((Run(op), Drop((result,)))), ())
    frame = Frame(len(joint.graph.tensors), [], Drawing(), None, quick=True)
    frame.table[source] = torch.ones(3, 16)
    lines[0](frame)
    assert wire.events == ["begin 0"]
    lines[1](frame)
    assert wire.events == ["begin 0", "end 0"]
    assert frame.table[result] is None
    assert not frame.sums


def test_nothing_is_sent_while_a_step_is_tried_out(wire):
    step, _ = compiled(summed, store_all)
    model = net()
    with StandIns():
        found = gradients(step, model)
    assert wire.events == []
    expected = gradients(lambda m, x: plain(m, x, 1.0), net())
    assert all(map(torch.equal, found, expected))


def test_a_sum_that_fails_is_told_where_it_is_waited_for(wire):
    step, made = compiled(summed, store_all)
    model = net()
    gradients(step, model)
    wire.fails = True
    with pytest.raises(RunError, match="rank 1 has died"):
        gradients(step, model)
    assert wire.events[-1] == "begin 11"
    wire.fails = False
    wire.events.clear()
    assert all(map(torch.equal, gradients(step, model), gradients(step, model)))
    assert made[0].joint is not None
