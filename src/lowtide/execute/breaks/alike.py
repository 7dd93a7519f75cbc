"""Graphs that differ in numbers alone: what one of them runs by is good for the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from lowtide.execute.tiling.plan_tiles import has_loop
from lowtide.graph import Graph, Op
from lowtide.plan.result.plan import Plan

__all__ = ["alike", "plan_of_one_like"]


def plan_of_one_like(graph: Graph, known: Iterable[tuple[Graph, Plan]]) -> Plan | None:
    """The plan of a graph that differs from this one in numbers alone; none in tiles, which hold numbers."""
    for other, plan in known:
        if not has_loop(plan.program) and alike(graph, other):
            return replace(plan, graph=graph)
    return None


def alike(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same but for numbers that operators take; all tensors are of one size."""
    return one is other or _numberless(one) == _numberless(other)


def _numberless(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(map(_without_numbers, graph.ops)))


def _without_numbers(op: Op) -> Op:
    given = None if op.arguments is None else tuple(map(_erased, op.arguments))
    options = {name: _erased(value) for name, value in op.options.items()}
    body = None if op.body is None else _numberless(op.body)
    return replace(op, arguments=given, options=options, body=body)


_NOT_FINITE = ("inf", "-inf", "nan")
"""How a graph writes numbers that JSON has not."""


def _erased(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_erased(item) for item in value]
    if value in _NOT_FINITE:
        return 0
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value
