"""Graphs of files of the version before, in which what operators mean stood among their attributes."""

from __future__ import annotations

from typing import Any

import msgspec

from lowtide.errors import GraphError
from lowtide.graph.types import LOOP, Graph, Op

__all__ = ["upgraded"]

_OF_GRAPHS = {"returned": tuple[int, ...], "updated": tuple[int, ...], "updated_early": tuple[int, ...]}
_OF_OPS: dict[str, Any] = {
    "random": bool,
    "once": bool,
    "updates": tuple[int, ...],
    "short": tuple[int, ...],
    "differentiates": str,
    "axes": tuple[int, ...],
    "overload": str,
    "arguments": tuple[Any, ...],
    "options": dict[str, Any],
    "strides": tuple[tuple[int, ...] | None, ...],
    "in_place": bool,
}


def upgraded(graph: Graph) -> Graph:
    """The graph with fields in the place of attributes that had a meaning; a GraphError names a wrong one."""
    try:
        rest, fields = _split(graph.attributes, _OF_GRAPHS)
    except msgspec.ValidationError as error:
        raise GraphError(f"an attribute of the graph is not what lowtide wrote: {error}") from None
    ops = tuple(_upgraded_op(k, op) for k, op in enumerate(graph.ops))
    return msgspec.structs.replace(graph, ops=ops, attributes=rest, **fields)


def _upgraded_op(number: int, op: Op) -> Op:
    known = _OF_OPS.keys() & op.attributes.keys()
    if op.kind != LOOP:
        known -= {"axes"}  # another program's word
    if not known:
        return op
    try:
        rest, fields = _split(op.attributes, {name: _OF_OPS[name] for name in known})
    except msgspec.ValidationError as error:
        said = f"an attribute of operator {op.id!r} is not what lowtide wrote: {error}"
        raise GraphError(said, op=number) from None
    return msgspec.structs.replace(op, attributes=rest, **fields)


def _split(attributes: dict[str, Any], kinds: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes that stay, and those that are fields now, by name."""
    rest = {name: value for name, value in attributes.items() if name not in kinds}
    moved = {name: value for name, value in attributes.items() if name in kinds}
    return rest, {name: msgspec.convert(value, kinds[name]) for name, value in moved.items()}
