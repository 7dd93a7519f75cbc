"""Says whether the attributes that Lowtide itself reads hold what it writes there.

They are in captured steps alone. A reader keeps all attributes of a file as they are; who plans a step from a
file or cuts it asks here first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import inf
from typing import Any

from lowtide.errors import GraphError
from lowtide.graph.types import LOOP, Graph, Op

__all__ = ["check_attributes"]

_TENSORS = ("returned", "updated", "updated_early")
"""Attributes of a graph that list its tensors."""


def check_attributes(graph: Graph) -> Graph:
    """Return the graph itself, or raise a GraphError that names the first attribute that does not."""
    for name in _TENSORS:
        if not _positions(graph.attributes.get(name, ()), len(graph.tensors)):
            raise GraphError(f"the attribute {name!r} of the graph does not list tensors")
    for k, op in enumerate(graph.ops):
        for name, expected in _wrong(graph, op):
            raise GraphError(f"the attribute {name!r} of operator {op.id!r} does not {expected}", op=k)
    return graph


def _wrong(graph: Graph, op: Op) -> Iterator[tuple[str, str]]:
    """Attributes of an operator that are not as they should be, and what they do not do."""
    given = op.attributes
    if not _positions(given.get("updates", ()), len(op.inputs)):
        yield "updates", "list inputs"
    if not _positions(given.get("short", ()), len(op.outputs)):
        yield "short", "list outputs"
    if op.kind == LOOP and not _positions(given.get("axes", ()), inf):
        yield "axes", "list lengths"
    for name in ("overload", "differentiates"):
        if not isinstance(given.get(name, ""), str):
            yield name, "hold a name"
    arguments, options = given.get("arguments", ()), given.get("options", {})
    if not isinstance(arguments, list | tuple) or not _refer(arguments, len(op.inputs)):
        yield "arguments", "list arguments"
    if not isinstance(options, dict) or not _refer(options.values(), len(op.inputs)):
        yield "options", "hold arguments by name"
    if not _fit(graph, op, given.get("strides", ())):
        yield "strides", "hold strides for each input"


def _positions(listed: object, count: float) -> bool:
    return isinstance(listed, list | tuple) and all(type(k) is int and 0 <= k < count for k in listed)


def _refer(values: Collection[Any], inputs: int) -> bool:
    """Whether every tensor among arguments, and in lists among them, is an input."""
    for value in values:
        if isinstance(value, dict) and not _positions([value.get("input")], inputs):
            return False
        if isinstance(value, list | tuple) and not _refer(value, inputs):
            return False
    return True


def _fit(graph: Graph, op: Op, strides: object) -> bool:
    """Whether there is nothing, or for each input a number for each of its dimensions."""
    if not strides and isinstance(strides, list | tuple):
        return True
    if not isinstance(strides, list | tuple) or len(strides) != len(op.inputs):
        return False
    for t, one in zip(op.inputs, strides, strict=True):
        shape = graph.tensors[t].shape
        if one is None:
            continue
        if not isinstance(one, list | tuple) or not all(type(n) is int for n in one):
            return False
        if shape is not None and len(one) != len(shape):
            return False
    return True
