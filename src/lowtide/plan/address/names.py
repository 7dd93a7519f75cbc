"""A name for every allocation, for people and for files: each stands for one allocation alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lowtide.graph import Graph
from lowtide.plan.address.types import Allocation, Purpose
from lowtide.plan.program.instructions import Program, Run

__all__ = ["names_of"]


def names_of(allocations: Sequence[Allocation], graph: Graph, program: Program | None = None) -> list[str]:
    """The tensor's id, or the operator's with what the memory is for; ``#2`` where it is taken again.

    Without a Program, allocations are those of the graph in program order. Inside of a loop, the names of
    the loop and of the body stand in front.
    """
    seen: Counter[str] = Counter()
    names = []
    taken = {one.id for one in graph.tensors}
    for one in allocations:
        name = _name(one, one.at, graph, program)
        seen[name] += 1
        while seen[name] > 1 and f"{name}#{seen[name]}" in taken:
            seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _name(one: Allocation, at: tuple[int, ...], graph: Graph, program: Program | None) -> str:
    if program is not None and len(at) > 2:
        place, number, *rest = at
        body = program.bodies[number]
        inside = _name(one, tuple(rest), body.graph, body.program)
        return f"{_operator(place, graph, program)}/{number}/{inside}"
    if one.tensors:
        tensor = graph.tensors[one.tensors[0]].id
        return f"{tensor}:{one.use.value}" if one.use in (Purpose.AGAIN, Purpose.COPY) else tensor
    if one.use is Purpose.WORKSPACE:
        return f"{_operator(at[0], graph, program)}:{one.use.value}"
    return f":{one.use.value}"


def _operator(place: int, graph: Graph, program: Program | None) -> str:
    if program is None:
        return graph.ops[place].id
    line = program.instructions[place]
    assert isinstance(line, Run)
    return graph.ops[line.op].id
