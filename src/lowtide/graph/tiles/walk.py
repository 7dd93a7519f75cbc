"""Walks against the order of operators: from what is wanted to what is needed for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lowtide.graph.access import Access
from lowtide.graph.rect import Rect
from lowtide.graph.types import Graph, Op, Role

__all__ = ["ancestors", "parts_for", "reads_of", "roots"]


def parts_for(
    graph: Graph, ops: Sequence[int], accesses: Mapping[int, Access], wanted: Mapping[int, Rect]
) -> dict[int, Rect]:
    """The part of every tensor that these operators, in program order, need for the parts that are wanted.

    A tensor that several operators read is needed in the smallest Rect that holds all their parts.
    """
    parts = dict(wanted)
    for k in reversed(ops):
        op = graph.ops[k]
        for output, relation in zip(op.outputs, accesses[k].relations, strict=True):
            if output not in parts or parts[output].empty:
                continue
            for tensor, need in zip(op.inputs, relation.needs(parts[output]), strict=True):
                if need is not None and not need.empty:
                    parts[tensor] = parts[tensor].hull(need) if tensor in parts else need
    return parts


def reads_of(op: Op, access: Access, outputs: Iterable[int]) -> set[int]:
    """The tensors whose values an operator reads for these of its outputs."""
    wanted = set(outputs)
    return {
        tensor
        for output, relation in zip(op.outputs, access.relations, strict=True)
        if output in wanted
        for tensor, indices in zip(op.inputs, relation.inputs, strict=True)
        if indices is not None
    }


def ancestors(
    graph: Graph, ops: Sequence[int], accesses: Mapping[int, Access], tensors: Iterable[int]
) -> tuple[set[int], list[int]]:
    """Everything that these tensors are computed from, themselves included, and the operators that do it.

    Operators are in program order, and no others than ``ops`` are looked at.
    """
    found, used = set(tensors), []
    for k in reversed(ops):
        wanted = [t for t in graph.ops[k].outputs if t in found]
        if wanted:
            used.append(k)
            found |= reads_of(graph.ops[k], accesses[k], wanted)
    return found, used[::-1]


def roots(graph: Graph, ops: Sequence[int], accesses: Mapping[int, Access]) -> dict[int, frozenset[int]]:
    """For every tensor the inputs of the step from which these operators compute it."""
    found = {t: frozenset((t,)) for t, tensor in enumerate(graph.tensors) if tensor.role is Role.INPUT}
    nothing: frozenset[int] = frozenset()
    for k in ops:
        for output in graph.ops[k].outputs:
            reads = reads_of(graph.ops[k], accesses[k], (output,))
            found[output] = nothing.union(*(found.get(t, nothing) for t in reads))
    return found
