"""Says whether fields that refer to tensors, inputs and outputs by their position refer to something.

They are in captured steps alone. Who plans a step from a file or cuts it asks here first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import inf
from typing import Any

from lowtide.errors import GraphError
from lowtide.graph.types import Graph, Op

__all__ = ["check_fields"]

_TENSORS = ("returned", "updated", "updated_early")
"""Fields of a graph that list its tensors."""


def check_fields(graph: Graph) -> Graph:
    """Return the graph itself, or raise a GraphError that names the first field that is wrong."""
    for name in _TENSORS:
        if not _positions(getattr(graph, name), len(graph.tensors)):
            raise GraphError(f"the field {name!r} of the graph does not list tensors")
    for k, op in enumerate(graph.ops):
        for name, expected in _wrong(graph, op):
            raise GraphError(f"the field {name!r} of operator {op.id!r} does not {expected}", op=k)
    return graph


def _wrong(graph: Graph, op: Op) -> Iterator[tuple[str, str]]:
    """Fields of an operator that are not as they should be, and what they do not do."""
    if not _positions(op.updates, len(op.inputs)):
        yield "updates", "list inputs"
    if not _positions(op.short, len(op.outputs)):
        yield "short", "list outputs"
    if not _positions(op.axes, inf):
        yield "axes", "list lengths"
    if not _refer(op.arguments or (), len(op.inputs)):
        yield "arguments", "list arguments"
    if not _refer(op.options.values(), len(op.inputs)):
        yield "options", "hold arguments by name"
    if not _fit(graph, op):
        yield "strides", "hold strides for each input"


def _positions(listed: Iterable[object], count: float) -> bool:
    return all(type(k) is int and 0 <= k < count for k in listed)


def _refer(values: Collection[Any], inputs: int) -> bool:
    """Whether every tensor among arguments, and in lists among them, is an input."""
    for value in values:
        if isinstance(value, dict) and not _positions([value.get("input")], inputs):
            return False
        if isinstance(value, list | tuple) and not _refer(value, inputs):
            return False
    return True


def _fit(graph: Graph, op: Op) -> bool:
    """Whether there is nothing, or for each input a number for each of its dimensions."""
    if not op.strides:
        return True
    if len(op.strides) != len(op.inputs):
        return False
    shapes = [graph.tensors[t].shape for t in op.inputs]
    pairs = zip(op.strides, shapes, strict=True)
    return all(one is None or shape is None or len(one) == len(shape) for one, shape in pairs)
