"""Devices as threads of this process, each with the step of its own."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from lowtide.trace.distributed.wires import connect
from lowtide.trace.shards.local import local_step

SECONDS = 60


class Hub:
    """Connects threads."""

    def __init__(self, count):
        self.count = count
        self.boxes = {(a, b): queue.Queue() for a in range(count) for b in range(count)}
        self.barrier = threading.Barrier(count, timeout=SECONDS)
        self.parts = [None] * count


class ThreadWire:
    def __init__(self, hub, place):
        self.hub, self.place, self.sent_bytes = hub, place, 0

    def swap(self, sends, receives):
        for to, x in sends:
            self.sent_bytes += x.nbytes
            self.hub.boxes[self.place, to].put(x.clone())
        for come, x in receives:
            arrived = self.hub.boxes[come, self.place].get(timeout=SECONDS)
            assert arrived.shape == x.shape
            x.copy_(arrived)

    def add_up(self, x):
        self.sent_bytes += x.nbytes
        self.hub.parts[self.place] = x.clone()
        self.hub.barrier.wait()
        assert {one.shape for one in self.hub.parts} == {x.shape}
        total = sum(self.hub.parts[1:], self.hub.parts[0])
        self.hub.barrier.wait()
        x.copy_(total)


def on_devices(joint, shards, values):
    """The loss of each device, and its parts of the gradients and of what it was given."""
    mesh = shards.mesh
    wires = {}
    for axis in range(len(mesh.sizes)):
        for line in {mesh.line(rank, axis) for rank in range(mesh.devices)}:
            hub = Hub(len(line))
            for place, rank in enumerate(line):
                wires[rank, axis] = ThreadWire(hub, place)

    def run(rank):
        names = [f"rank {rank}, axis {axis}" for axis in range(len(mesh.sizes))]
        for axis, name in enumerate(names):
            connect(name, wires[rank, axis])
        local = local_step(joint, shards, rank, names)
        given = []
        for place, (value, box) in enumerate(zip(values, local.boxes, strict=True)):
            part = value.detach()[box.slices()].clone()
            given.append(part.requires_grad_() if joint.gradients[place] is not None else part)
        loss = local.module(*given)[0]
        loss.backward()
        for place, axes in local.summed.items():
            for axis in axes:
                wires[rank, axis].add_up(given[place].grad)
        for name in names:
            connect(name, None)
        return loss.detach(), local.boxes, given

    with ThreadPoolExecutor(mesh.devices) as threads:
        return list(threads.map(run, range(mesh.devices))), wires


def relative(found, expected, least):
    """The difference of a gradient, as a share of its norm, or of ``least`` where that is next to nothing."""
    return float((found - expected).norm()) / max(float(expected.norm()), least)


def doubled(values):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values]
