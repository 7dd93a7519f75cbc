"""Graphs of a share: they end at communications, which happen between them in every replay."""

import copy
import gc
import os
from datetime import timedelta

import msgspec
import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.wire import WireSpeed
from lowtide.errors import RunError
from lowtide.execute.compile.family import Shapes
from lowtide.execute.graphs import replay
from lowtide.execute.shards.choose import choose_shards
from lowtide.execute.shards.meshes import connected
from lowtide.execute.shards.split import cut_model, named_tensors, proven_communications, split_step
from lowtide.graph import EXCHANGE, SUM
from lowtide.graph.shards import Shards
from lowtide.plan.program.instructions import Run
from lowtide.trace.shards.kinds import CUT_KINDS
from lowtide.trace.step.capture import capture
from tests.execute.graphs import recorded
from tests.execute.shards.test_mesh_step import joined

OPTIONS = {"time_limit": 1.0, "verify": False, "fullgraph": True, "cost": "estimated", "kernels": "eager"}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.norm, self.middle = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 5, padding=2)

    def forward(self, x):
        return self.last(self.middle(self.norm(self.first(x)).relu()).sigmoid())


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def example(device="cpu"):
    torch.manual_seed(0)
    rows, size = (4, (20, 16)) if device == "cpu" else (32, (256, 192))  # much to allocate on a GPU
    pair = torch.randn(rows, 3, *size), torch.randn(rows, 4, *size)
    return [x.double().to(device) for x in (Network(), *pair)]


def chosen(here, joint, kind):
    """A split of this kind, chosen once: another one, as on a busy machine, would give other bits."""
    found = (
        b"" if here.rank else msgspec.json.encode(choose_shards(joint, here.mesh, 5.0, CUT_KINDS[kind])[0])
    )
    return msgspec.json.decode(here.meeting.everybody("split", found)[0], type=Shards)


def steps(here, joint, shards, whole, batch, graphs, budget="100%", **more):
    """A share of a split, ready to be trained."""
    model, split = copy.deepcopy(whole), split_step(joint, shards, here)
    cut_model(model, split.boxes)
    named = named_tensors(loss_of, model, *batch)
    parts = [named[name][box.slices()].clone() for name, _, box in split.inputs]
    step = here.meeting.settled(
        "plan",
        lambda: lowtide.fit(split.step, model, *parts, budget=budget, graphs=graphs, **(OPTIONS | more)),
    )
    return step, model, parts, proven_communications(step.plan, here, split)


def trained(here, step, model, parts, talks, count=8):
    """Losses, gradients, parameters and buffers of some steps, and the bytes sent in each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found, sent = [], []
    for _ in range(count):
        before = sum(wire.sent_bytes for wire in here.wires)
        here.watch.begin([one.label for one in talks])
        optimizer.zero_grad()
        loss = step(model, *parts)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        sent.append(sum(wire.sent_bytes for wire in here.wires) - before)
    return [*found, *(x.detach().clone() for x in (*model.parameters(), *model.buffers()))], set(sent)


def compared(rank, port, kinds):
    joined(rank, port)
    Shapes.replayed = recorded.replayed
    whole, *batch = example()
    joint, here = capture(loss_of, whole, *batch).joint, connected(2, links=[WireSpeed()])
    beside = 0
    for kind in kinds:
        shards = chosen(here, joint, kind)
        plain = steps(here, joint, shards, whole, batch, "off")
        expected, sent = trained(here, *plain)
        for graphs in ("auto", "off" if rank else "auto"):  # the other one may run as always
            made = steps(here, joint, shards, whole, batch, graphs)
            found, by_graphs = trained(here, *made)
            assert by_graphs == sent == {sum(one.sent_bytes for one in made[3])}, kind
            other = [k for k, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
            assert not other, (kind, graphs, other)
            if graphs == "auto":
                (told,) = made[0].explain_graphs()
                assert "between which processes communicate" in told, told
        graph, program = made[0].plan.graph, made[0].plan.program
        kinds = {op.kind for op in graph.ops}
        assert kinds & {SUM, EXCHANGE}
        beside += sum(isinstance(line, Run) and bool(line.beside) for line in program.instructions)
    assert beside or "fully sharded" not in kinds  # exchanges that go on while graphs are replayed
    here.watch.close()
    torch.distributed.destroy_process_group()
    os.write(1, b"done\n")


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("fully sharded",), id="beside"),
        pytest.param(("data parallel", "height", "features"), id="others", marks=pytest.mark.extended),
    ],
)
def test_the_bits_are_those_without_graphs(kinds, forks, free_port):
    forks.spawn(compared, (free_port, kinds), 2)
    assert forks.printed()[0].splitlines() == ["done"] * 2


def left_alone(rank, port):
    joined(rank, port)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    Shapes.replayed = recorded.replayed
    whole, *batch = example()
    joint, here = capture(loss_of, whole, *batch).joint, connected(2, links=[WireSpeed()])
    made = steps(here, joint, chosen(here, joint, "inner"), whole, batch, "auto")
    assert made[0].plan.graph.updated_early  # forward updates buffers, and communicates behind that
    trained(here, *made)
    if rank:
        os._exit(0)
    before = [x.clone() for x in made[1].buffers()]
    with pytest.raises(RunError, match="rank 1 has died, or cannot be reached: it was"):
        trained(here, *made)
    assert all(map(torch.equal, before, made[1].buffers()))
    here.watch.close()
    os.write(1, b"told\n")
    os._exit(0)


def test_a_process_that_dies_is_named_in_a_replay(forks, free_port):
    forks.spawn(left_alone, (free_port,), 2)
    assert forks.printed()[0].splitlines() == ["told"]


def fitted(rank, port):
    joined(rank, port)
    Shapes.replayed = recorded.replayed
    whole, *batch = example()
    one = lowtide.fit(loss_of, copy.deepcopy(whole), *batch, budget="100%", **OPTIONS)
    budget = int(0.6 * one.plan.plain.peak_bytes)
    options = {"budget": budget, "mesh": 2, "time_limit": 1.0, "cost": "estimated", "verify": False}
    pairs = []
    for graphs in ("off", "auto"):
        model = copy.deepcopy(whole)
        step = lowtide.fit(loss_of, model, *batch, graphs=graphs, **options)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for number in range(8):
            if number == 5:
                with torch.no_grad():
                    losses.append(step(model, *batch))
            optimizer.zero_grad()
            losses.append(step(model, *batch))
            losses[-1].backward()
            optimizer.step()
        pairs.append(losses)
    assert all(map(torch.equal, *pairs))
    assert "between which processes communicate" in step.explain()
    assert step.graph_bytes > 0
    (common,) = (one for way in step._ways.values() for one in way.local._shapes.common.values())
    assert common._steps
    step.here.watch.close()
    del step
    assert not common._steps  # nothing else holds what was captured
    torch.distributed.destroy_process_group()
    os.write(1, b"done\n")


@pytest.mark.extended
def test_a_step_on_a_mesh_tells_of_its_graphs(forks, free_port):
    forks.spawn(fitted, (free_port,), 2)
    assert forks.printed()[0].splitlines() == ["done"] * 2


GPU_CASES = {
    "height": {"budget": "2GiB"},
    "fully sharded": {"budget": "2GiB"},
    "recomputed": {"budget": "85%", "only": "recompute"},
    "offloaded": {"budget": "85%", "only": "offload"},
}


def compared_on_a_gpu(rank, port):
    """Both processes have the same GPU; gloo goes through the host."""
    joined(rank, port)
    os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.backends.cudnn.deterministic = True
    replay.slower = lambda always, replayed: False
    whole, *batch = example("cuda")
    joint, here = capture(loss_of, whole, *batch).joint, connected(2, links=[WireSpeed()])
    for name, options in GPU_CASES.items():
        kind, options = name if name in CUT_KINDS else "fully sharded", options | {"cost": "measured"}
        shards = chosen(here, joint, kind)
        plain = steps(here, joint, shards, whole, batch, "off", **options)
        expected, sent = trained(here, *plain)
        del plain
        gc.collect()
        torch.cuda.empty_cache()
        made = steps(here, joint, shards, whole, batch, "auto", **options)
        step, plan = made[0], made[0].plan
        found, by_graphs = trained(here, *made)
        (told,) = step.explain_graphs()
        os.write(1, f"{rank} {name}: {told}; {plan.decisions.offloaded} offloaded\n".encode())
        assert "between which processes communicate" in told, (name, told)
        assert by_graphs == sent == {sum(one.sent_bytes for one in made[3])}, name
        other = [k for k, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
        assert not other, (name, other, told)
        model, parts, talks = made[1:]
        model.zero_grad()
        del found, expected
        torch.cuda.reset_peak_memory_stats()
        here.watch.begin([one.label for one in talks])
        step(model, *parts).backward()
        peak = torch.cuda.max_memory_allocated() + step.graph_bytes
        assert 0 < step.graph_bytes < peak
        os.write(1, f"{rank} {name}: {peak} of {plan.budget_bytes} bytes\n".encode())
        assert peak <= plan.budget_bytes
        del step, made, model, parts
        gc.collect()
        torch.cuda.empty_cache()
    here.watch.close()
    torch.distributed.destroy_process_group()
    os.write(1, b"done\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_bits_are_those_without_graphs_on_a_gpu(forks, free_port):
    try:
        forks.spawn(compared_on_a_gpu, (free_port,), 2)
    finally:
        os.write(1, forks.printed()[0].encode())
    assert forks.printed()[0].splitlines().count("done") == 2
