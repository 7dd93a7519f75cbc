"""Offload inside a share: activations are on the host while exchanges go on beside operators."""

import copy
import os

import torch
from torch import nn

import lowtide
from lowtide.cost.wire import WireSpeed
from lowtide.execute.shards.choose import choose_shards
from lowtide.execute.shards.meshes import connected
from lowtide.execute.shards.split import cut_model, named_tensors, split_step
from lowtide.plan.program.instructions import Fetch, Run, Send
from lowtide.trace.shards.kinds import CUT_KINDS
from lowtide.trace.step.capture import capture
from tests.execute.shards.test_mesh_step import joined
from tests.execute.shards.test_tiles import trained_once


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(
                one
                for _ in range(4)
                for one in (nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32), nn.Sigmoid())
            )
        )

    def forward(self, x):
        return self.layers(x)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def example():
    torch.manual_seed(0)
    return Network().double(), torch.randn(512, 32).double(), torch.randn(512, 32).double()


def trained(rank, port):
    joined(rank, port)
    whole, *batch = example()
    loss_of(whole, *batch).backward()
    joint, here = capture(loss_of, whole, *batch).joint, connected(2, links=[WireSpeed()])
    for kind in ("fully sharded", "features"):
        model = copy.deepcopy(whole)
        model.zero_grad()
        split = split_step(joint, choose_shards(joint, here.mesh, 2.0, CUT_KINDS[kind])[0], here)
        cut_model(model, split.boxes)
        named = named_tensors(loss_of, model, *batch)
        parts = [named[name][box.slices()].clone() for name, _, box in split.inputs]
        options = {"time_limit": 1.0, "verify": False, "fullgraph": True, "only": "offload"}
        step = lowtide.fit(split.step, model, *parts, budget="60%", **options)
        lines = step.plan.program.instructions
        beside = [line for line in lines if isinstance(line, Run) and line.beside]
        assert step.plan.decisions.offloaded
        assert not step.plan.decisions.recomputed
        assert {type(line) for line in lines} >= {Send, Fetch}
        assert bool(beside) == (kind == "fully sharded"), (kind, len(beside))
        for _ in range(3):
            loss = trained_once(step, model, parts, split, here, whole)
            assert step.plan.predicted.peak_bytes < 0.7 * step.plan.plain.peak_bytes, kind
            assert torch.allclose(loss, loss_of(whole, *batch), rtol=1e-12)
    here.watch.close()
    torch.distributed.destroy_process_group()
    os.write(1, b"done\n")


def test_offload_beside_exchanges(forks, free_port):
    forks.spawn(trained, (free_port,), 2)
    assert forks.printed()[0].splitlines() == ["done"] * 2
