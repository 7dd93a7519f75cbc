"""Tiles inside a share: between exchanges, with gradients, bytes sent and peaks as without them; evaluated too."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.cost.wire import WireSpeed
from lowtide.errors import CaptureError
from lowtide.execute.shards.choose import choose_shards
from lowtide.execute.shards.meshes import connected
from lowtide.execute.shards.split import cut_model, named_tensors, proven_communications, split_step
from lowtide.execute.tiling.between import arrivals, departures
from lowtide.graph import EXCHANGE, LOOP, SUM
from lowtide.graph.shards import Mesh
from lowtide.trace.distributed.wires import connect
from lowtide.trace.shards.device_step import device_step
from lowtide.trace.shards.kinds import CUT_KINDS
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.gradient_order import refuse_another_order
from lowtide.trace.tiles.loop import looped
from lowtide.trace.tiles.tiling import Tiling
from tests.execute.shards.test_mesh_step import joined
from tests.trace.shards.devices import Hub, ThreadWire

CASES = {"data parallel": 1_200_000, "fully sharded": 1_200_000, "height": 1_600_000}
"""Kinds of cuts, with budgets below what a share takes without tiles (3.2 MiB or more)."""
OPTIONS = {"time_limit": 1.0, "verify": False, "fullgraph": True}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)
        self.up, self.down = nn.Conv2d(2, 32, 1), nn.Conv2d(32, 2, 1)

    def forward(self, x):
        """Most of it is between two exchanges of rows."""
        return self.last(self.down(self.up(self.first(x)).relu()))


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def example():
    torch.manual_seed(0)
    return Network().double(), torch.randn(8, 3, 32, 32).double(), torch.randn(8, 4, 32, 32).double()


def trained(rank, port):
    joined(rank, port)
    whole, *batch = example()
    loss_of(whole, *batch).backward()
    joint, here = capture(loss_of, whole, *batch).joint, connected(2, links=[WireSpeed()])
    for kind, budget in CASES.items():
        model = copy.deepcopy(whole)
        model.zero_grad()
        split = split_step(joint, choose_shards(joint, here.mesh, 2.0, CUT_KINDS[kind])[0], here)
        cut_model(model, split.boxes)
        named = named_tensors(loss_of, model, *batch)
        parts = [named[name][box.slices()].clone() for name, _, box in split.inputs]
        given = (
            budget if rank or kind == "height" else 2**30
        )  # the other one needs no tiles, and still meets it
        step = lowtide.fit(split.step, model, *parts, budget=given, **OPTIONS)
        assert bool(step.plan.decisions.tiles) == (given == budget), kind
        resident = sum(x.nbytes for x in (*model.parameters(), *parts))
        for _ in range(2):
            loss = trained_once(step, model, parts, split, here, whole)
            assert step.plan.predicted.peak_bytes <= given, kind
            assert torch.allclose(loss, loss_of(whole, *batch), rtol=1e-12)
        model.zero_grad()
        with torch.no_grad():
            if kind == "height":  # evaluated without tiles otherwise
                given = budget = 1_100_000
                step = lowtide.fit(split.step, model, *parts, budget=given, **OPTIONS)
            step(model, *parts)
            talks = proven_communications(step.plan, here, split)
            before = here.wires[0].sent_bytes
            loss, seen = watch_cpu(lambda _, step=step, model=model, parts=parts: step(model, *parts))
        assert bool(step.plan.decisions.tiles) == (given == budget), kind
        assert seen.peak_bytes + resident <= step.plan.predicted.peak_bytes <= given, kind
        assert here.wires[0].sent_bytes - before == sum(one.sent_bytes for one in talks) > 0
        assert torch.allclose(loss, loss_of(whole, *batch), rtol=1e-12)
    here.watch.close()
    torch.distributed.destroy_process_group()
    os.write(1, b"done\n")


def trained_once(step, model, parts, split, here, whole):
    """The loss of a step, whose gradients are those of the whole, and which takes and sends what is planned."""
    model.zero_grad()
    talks = proven_communications(step.plan, here, split)
    resident = sum(x.nbytes for x in (*model.parameters(), *parts))
    before = here.wires[0].sent_bytes
    loss, seen = watch_cpu(lambda _: run(step, model, parts))
    assert seen.peak_bytes + resident <= step.plan.predicted.peak_bytes
    assert here.wires[0].sent_bytes - before == sum(one.sent_bytes for one in talks) > 0
    expected = dict(whole.named_parameters())
    for name, p in model.named_parameters():
        wanted = expected[name].grad[split.boxes[name].slices()]
        assert float((p.grad - wanted).norm() / wanted.norm()) < 1e-13, name
    return loss


def run(step, model, parts):
    loss = step(model, *parts)
    loss.backward()
    return loss.detach()


def test_processes_with_and_without_tiles_compute_what_one_device_does(forks, free_port):
    forks.spawn(trained, (free_port,), 2)
    assert forks.printed()[0].splitlines() == ["done"] * 2


@pytest.fixture(scope="module")
def share():
    """The step of a device that has half of the rows."""
    model, *batch = example()
    joint = capture(loss_of, model, *batch).joint
    shards, _ = choose_shards(joint, Mesh((2,)), 2.0, CUT_KINDS["height"])
    made = device_step(joint, shards, 0, sums=True).joint
    connect("shape of rank 0, axis 0", ThreadWire(Hub(2), 0))
    yield made
    connect("shape of rank 0, axis 0", None)


def talking(joint):
    return [op.kind for op in joint.graph.ops if op.kind in (EXCHANGE, SUM)]


def test_tiles_leave_communications_in_their_order(share):
    assert share.marks is None
    assert len(share.summed) >= 3
    begins, ends = arrivals(share), departures(share)
    assert len(begins) >= 2
    assert ends
    for end in ("", *ends):
        tiling = Tiling(share, begins, end)
        made = looped(share, tiling.boxes((2,)), begins, end)
        assert any(op.kind == LOOP for op in made.graph.ops)
        assert talking(made) == talking(share)
        assert [k for k, t in enumerate(made.inputs) if t in made.summed] == [
            k for k, t in enumerate(share.inputs) if t in share.summed
        ]
        for joint in made.calls[
            next(k for k, op in enumerate(made.graph.ops) if op.kind == LOOP)
        ].target.bodies:
            assert not talking(joint)


def test_a_region_with_an_exchange_is_refused(share):
    boxes = Tiling(share).boxes((2,))
    with pytest.raises(CaptureError, match=r"lowtide.exchange cannot run in tiles"):
        looped(share, boxes)


def test_another_order_of_gradients_is_refused(share):
    made = looped(share, Tiling(share, arrivals(share)).boxes((2,)), arrivals(share))
    swapped = list(made.inputs)
    first, second = [k for k, t in enumerate(made.inputs) if t in made.summed][:2]
    swapped[first], swapped[second] = swapped[second], swapped[first]
    refuse_another_order(share, made, share.inputs, made.inputs)
    with pytest.raises(CaptureError, match="processes would communicate in another order"):
        refuse_another_order(share, made, share.inputs, swapped)
    unsummed = next(t for t in share.inputs if t not in share.summed)
    more = replace(share, summed={**share.summed, unsummed: ("shape of rank 0, axis 0",)})
    with pytest.raises(CaptureError, match="processes would communicate in another order"):
        refuse_another_order(more, made, share.inputs, made.inputs)
