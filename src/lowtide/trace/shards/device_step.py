"""``device_step``: what one device of a mesh runs, forward and backward, as a captured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.graph import Role
from lowtide.graph.shards import Shards
from lowtide.trace.distributed.exchange import ADD_UP, EXCHANGE
from lowtide.trace.distributed.wires import connect
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.shards.local import local_step
from lowtide.trace.step.joint import Joint, Leaf
from lowtide.trace.tiles.differentiate import Example, Forward, differentiated

__all__ = ["DeviceStep", "device_step"]


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The step of one device."""

    joint: Joint
    summed_bytes: int
    """Gradients of parameters that are added up behind backward."""
    messages: int
    """Exchanges and sums in a step."""
    wire_bytes: int
    """What the device sends in a step: pieces to others, and its part of each sum."""


class _Place:
    """A wire of which only the place on it is known."""

    def __init__(self, place: int) -> None:
        self.place = place

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        raise AssertionError(f"{len(sends)} and {len(receives)} messages while a step is looked at")

    def add_up(self, x: Tensor) -> None:
        raise AssertionError(f"a sum of {x.nbytes} bytes while a step is looked at")

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        raise AssertionError(f"a sum of {x.nbytes} bytes while a step is looked at")


def device_step(joint: Joint, shards: Shards, rank: int) -> DeviceStep:
    """The step of a device. A CaptureError names an operator that cannot be split as the Shards say."""
    mesh = shards.mesh
    names = [f"shape of rank {rank}, axis {axis}" for axis in range(len(mesh.sizes))]
    for axis, name in enumerate(names):
        connect(name, _Place(mesh.line(rank, axis).index(rank)))
    try:
        local = local_step(joint, shards, rank, names)
        examples, leaves = [], []
        for place, (t, box) in enumerate(zip(joint.inputs, local.boxes, strict=True)):
            assert t is not None
            value, tensor = joint.values[t], joint.graph.tensors[t]
            strides = torch.empty(box.shape, device="meta").stride()
            wants = joint.gradients[place] is not None
            examples.append(Example(box.shape, strides, value.dtype, value.device, wants))
            leaves.append(Leaf(tensor.label, tensor.role))
        forward = Forward(local.module.graph, examples, leaves, Layouts())
        found = differentiated(forward)
    finally:
        for name in names:
            connect(name, None)
    summed = [
        math.prod(local.boxes[place].shape) * joint.values[joint.inputs[place] or 0].element_size()
        for place, axes in local.summed.items()
        for _ in axes
        if joint.graph.tensors[joint.inputs[place] or 0].role is not Role.INPUT
    ]
    sent = [_sent(found, k, mesh.sizes) for k in range(len(found.calls))]
    count = sum(one > 0 for one in sent) + len(summed)
    return DeviceStep(found, sum(summed), count, sum(sent) + sum(summed))


def _sent(joint: Joint, k: int, sizes: Sequence[int]) -> int:
    """Bytes that an operator sends to others."""
    call, op = joint.calls[k], joint.graph.ops[k]
    if call.target is ADD_UP:
        return joint.graph.tensors[op.outputs[0]].bytes
    if call.target is not EXCHANGE:
        return 0
    x = joint.values[op.inputs[0]]
    dim, sends, wire = call.args[1], call.args[2], call.args[6]
    axis = int(str(wire).rpartition(" ")[2])
    rank = int(str(wire).split(",")[0].rpartition(" ")[2])
    mine = rank // math.prod(sizes[axis + 1 :]) % sizes[axis]
    pieces = [sends[i : i + 3] for i in range(0, len(sends), 3)]
    moved = sum(hi - lo for to, lo, hi in pieces if to != mine)
    return int(moved * (x.numel() // max(1, x.shape[dim])) * x.element_size())
