"""Costs without running anything: from shapes, and from what a device does at most."""

from __future__ import annotations

from lowtide.cost.device import Device
from lowtide.cost.types import Cost, Figure, Origin
from lowtide.cost.work import bytes_moved, flop, is_view
from lowtide.graph import Graph, Op

__all__ = ["estimate"]


def estimate(graph: Graph, device: Device) -> tuple[Cost, ...]:
    """A cost for every operator: it takes as long as its arithmetic or its traffic, whichever is slower.

    seconds = max(FLOP / matrix rate, bytes / bandwidth) + launch. Workspaces are not known: they depend on
    the algorithm that a library chooses, which only running it tells.
    """
    return tuple(_cost(graph, op, device) for op in graph.ops)


def _cost(graph: Graph, op: Op, device: Device) -> Cost:
    count, _ = flop(graph, op)
    moved = bytes_moved(graph, op)
    seconds = max(count / device.matrix_rate(_dtype(graph, op)), moved / device.bytes_per_second)
    if not is_view(graph, op) or device.kind == "cpu":  # elsewhere a view is not even launched
        seconds += device.launch_seconds
    spent, worked, bytes_ = (Figure(value, Origin.ESTIMATED) for value in (seconds, count, moved))
    return Cost(spent, worked, bytes_)


def _dtype(graph: Graph, op: Op) -> str | None:
    """The type of the first input or output that has one: products have it throughout."""
    return next((graph.tensors[t].dtype for t in (*op.inputs, *op.outputs) if graph.tensors[t].dtype), None)
