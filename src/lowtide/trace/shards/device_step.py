"""``device_step``: what one device of a mesh runs, forward and backward, as a captured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.graph import Role
from lowtide.graph.shards import Shards
from lowtide.trace.distributed.exchange import EXCHANGE
from lowtide.trace.distributed.wires import connect
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.shards.local import LocalStep, local_step
from lowtide.trace.shards.moved import MovedPart, marked, moved_parts, unmarked
from lowtide.trace.shards.sums import with_sums
from lowtide.trace.step.joint import Joint, Leaf
from lowtide.trace.tiles.differentiate import Example, Forward, differentiated

__all__ = ["DeviceStep", "device_step", "likeness"]


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
    moved: tuple[MovedPart, ...] = ()
    """Each of its communications, in order, but for those that send nothing."""
    wires: tuple[tuple[str, int], ...] = ()
    """Its connection along each axis of the mesh: the name, and its place on it."""


class _Place:
    """A wire of which only the place on it is known."""

    def __init__(self, place: int) -> None:
        self.place = place

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        raise AssertionError(f"{len(sends)} and {len(receives)} messages while a step is looked at")

    def begin_swap(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        raise AssertionError(f"{len(sends)} and {len(receives)} messages while a step is looked at")

    def add_up(self, x: Tensor) -> None:
        raise AssertionError(f"a sum of {x.nbytes} bytes while a step is looked at")

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        raise AssertionError(f"a sum of {x.nbytes} bytes while a step is looked at")


def likeness(joint: Joint, shards: Shards, rank: int) -> Hashable:
    """The same for devices whose steps differ in nothing but which devices they talk to.

    Their operators take the same time and memory, and they send as many bytes. A CaptureError names an
    operator that cannot be split as the Shards say.
    """
    with _connected(shards, rank) as places:
        local = local_step(joint, shards, rank, list(places))
    number = {node: k for k, node in enumerate(local.module.graph.nodes)}
    mine = list(places.values())

    def told(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return "node", number[value]
        if isinstance(value, list | tuple):
            return tuple(map(told, value))
        if isinstance(value, dict):
            return tuple((key, told(one)) for key, one in value.items())
        is_wire = isinstance(value, str) and value in places
        return ("wire", list(places).index(value)) if is_wire else repr(value)

    def arguments(node: fx.Node) -> Hashable:
        if node.target is torch.ops.aten.slice.Tensor and len(node.args) == 4:
            x, dim, start, end = node.args
            if isinstance(start, int) and isinstance(end, int) and 0 <= start <= end:
                return told((x, dim, end - start))
        if node.target is not EXCHANGE:
            return told(node.args)
        x, dim, sends, receives, *rest = node.args
        here = mine[list(places).index(str(rest[-1]))]
        flat: Any = (sends, receives)
        pieces = [
            sorted((one[k] == here, one[k + 2] - one[k + 1]) for k in range(0, len(one), 3)) for one in flat
        ]
        return told((x, dim, pieces, rest))

    nodes = [(n.op, str(n.target), arguments(n), told(n.kwargs)) for n in local.module.graph.nodes]
    return tuple(box.shape for box in local.boxes), tuple(nodes), told(dict(local.summed))


@contextmanager
def _connected(shards: Shards, rank: int) -> Iterator[dict[str, int]]:
    """Wires of a device along each axis, by name: its place on each."""
    mesh = shards.mesh
    axes = range(len(mesh.sizes))
    places = {f"shape of rank {rank}, axis {k}": mesh.line(rank, k).index(rank) for k in axes}
    for name, place in places.items():
        connect(name, _Place(place))
    try:
        yield places
    finally:
        for name in places:
            connect(name, None)


def device_step(joint: Joint, shards: Shards, rank: int, *, sums: bool = False) -> DeviceStep:
    """The step of a device; with ``sums``, gradients of parameters are added up by operators of it.

    A CaptureError names an operator that cannot be split as the Shards say.
    """
    with _connected(shards, rank) as places:
        names = list(places)
        local = local_step(joint, shards, rank, names)
        examples, leaves = [], []
        for place, (t, box) in enumerate(zip(joint.inputs, local.boxes, strict=True)):
            assert t is not None
            value, tensor = joint.values[t], joint.graph.tensors[t]
            strides = torch.empty(box.shape, device="meta").stride()
            wants = joint.gradients[place] is not None
            examples.append(Example(box.shape, strides, value.dtype, value.device, wants))
            leaves.append(Leaf(tensor.label, tensor.role))
        marked(local.module.graph, joint.graph)
        if sums:
            with_sums(local, names)
        found = differentiated(Forward(local.module.graph, examples, leaves, Layouts()))
    behind = [] if sums else list(_behind(joint, local))
    moved = (*moved_parts(found, shards.mesh.sizes), *behind)
    summed = sum(one.bytes for one in behind)
    sent, wires = sum(one.bytes for one in moved), tuple(places.items())
    return DeviceStep(unmarked(found), summed, len(moved), sent, moved, wires)


def _behind(joint: Joint, local: LocalStep) -> Iterator[MovedPart]:
    """Gradients of parameters that are added up once backward has ended."""
    for place, axes in local.summed.items():
        t = joint.inputs[place] or 0
        if joint.graph.tensors[t].role is not Role.INPUT:
            size = math.prod(local.boxes[place].shape) * joint.values[t].element_size()
            for axis in axes:
                yield MovedPart(t, -1, "sum", "backward", axis, -1, size)
