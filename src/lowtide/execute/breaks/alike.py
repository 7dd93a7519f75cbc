"""Graphs that differ in numbers alone: what one of them runs by is good for the other.

A number is a constant in the one and another constant in the other, or it is an argument of the other, which
has tensors for it (``trace/shapes/numbers.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from lowtide.execute.tiling.plan_tiles import has_loop
from lowtide.graph import Graph, Op, Tensor
from lowtide.plan.program.instructions import Drop, Fetch, Instruction, Program, Send
from lowtide.plan.result.plan import Plan
from lowtide.trace.shapes.numbers import is_number

__all__ = ["alike", "plan_of_one_like"]

_NOT_FINITE = ("inf", "-inf", "nan")
"""How a graph writes numbers that JSON has not."""


def plan_of_one_like(graph: Graph, known: Iterable[tuple[Graph, Plan]]) -> Plan | None:
    """The plan of a graph that differs from this one in numbers alone; none in tiles, which hold numbers."""
    for other, plan in known:
        if has_loop(plan.program) or not alike(graph, other):
            continue
        here, there = _others(graph), _others(other)
        if here == there:
            return replace(plan, graph=graph)
        if len(there) == len(other.tensors):
            return replace(plan, graph=graph, program=_renumbered(plan.program, here))
    return None


def alike(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same but for numbers that operators take; all tensors are of one size."""
    return one is other or _numberless(one) == _numberless(other)


def _renumbered(program: Program, place: Sequence[int]) -> Program:
    """The program with these tensors in the place of its own."""

    def renumbered(line: Instruction) -> Instruction:
        if isinstance(line, Drop):
            return Drop(tuple(place[t] for t in line.tensors))
        return replace(line, tensor=place[line.tensor]) if isinstance(line, Send | Fetch) else line

    forward, backward = (tuple(map(renumbered, part)) for part in (program.forward, program.backward))
    return replace(program, forward=forward, backward=backward)


def _numberless(graph: Graph) -> tuple[Any, ...]:
    """All of a graph but names, numbers, and the tensors that stand for numbers."""
    kept = _others(graph)
    place = {t: k for k, t in enumerate(kept)}
    called = {op.id: str(k) for k, op in enumerate(graph.ops)}
    tensors = [_placed(graph.tensors[t], place) for t in kept]
    ops = [_without_numbers(op, place, called) for op in graph.ops]
    ends = (graph.returned, graph.updated, graph.updated_early)
    return tensors, ops, [[place.get(t) for t in some] for some in ends]


def _others(graph: Graph) -> list[int]:
    """The tensors of a graph that stand for no numbers."""
    return [t for t, tensor in enumerate(graph.tensors) if not is_number(tensor)]


def _placed(tensor: Tensor, place: Mapping[int, int]) -> Tensor:
    alias = None if tensor.alias is None else place.get(tensor.alias)
    of = None if tensor.gradient_of is None else place.get(tensor.gradient_of)
    return replace(tensor, id="", alias=alias, gradient_of=of, source=None)


def _without_numbers(op: Op, place: Mapping[int, int], called: Mapping[str, str]) -> Op:
    taken = [k for k, t in enumerate(op.inputs) if t in place]
    order = {k: at for at, k in enumerate(taken)}
    return replace(
        op,
        id="",
        source=None,
        differentiates=called.get(op.differentiates, ""),
        inputs=tuple(place[op.inputs[k]] for k in taken),
        outputs=tuple(place[t] for t in op.outputs),
        updates=tuple(order[k] for k in op.updates if k in order),
        overload="" if op.overload in ("Scalar", "Tensor") else op.overload,
        arguments=None if op.arguments is None else tuple(_erased(one, order) for one in op.arguments),
        options={name: _erased(value, order) for name, value in op.options.items()},
        strides=tuple(op.strides[k] for k in taken) if len(op.strides) == len(op.inputs) else op.strides,
        body=None,
        attributes={**op.attributes, "body": repr(None if op.body is None else _numberless(op.body))},
    )


def _erased(value: Any, order: Mapping[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return [_erased(item, order) for item in value]
    if isinstance(value, dict) and "input" in value:
        return {"input": order[value["input"]]} if value["input"] in order else 0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return 0 if number or value in _NOT_FINITE else value
