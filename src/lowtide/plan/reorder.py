"""Independent operators in another order: whoever lets go of more than it makes runs as soon as it can.

So gradients and activations are released early. Operators whose order shows in the result stay in place:
random ones, those that update a tensor, and those that may run only once.
"""

from __future__ import annotations

from collections.abc import Collection

from lowtide.plan.problem import Problem

__all__ = ["early_order"]


def early_order(problem: Problem) -> list[int]:
    """The graph's operators of a problem in an order that releases storages early."""
    graph = problem.graph
    readers, producer = problem.readers, problem.producer
    place = {k: v for v, k in enumerate(problem.ops)}
    storage, writers = graph.storages(), _writers(problem)
    line = list(range(len(problem.ops)))
    for v in range(1, len(line)):
        if not _movable(problem, v):
            continue
        dying = {s for s in problem.reads[v] if not problem.kept[s] and readers[s][-1] == v}
        freed = sum(problem.bytes[s] for s in dying)
        if freed <= sum(problem.bytes[s] for s in problem.writes[v]) + problem.workspace[v]:
            continue
        after = [producer[s] for s in problem.reads[v]]
        after += [r for s in dying for r in readers[s] if r != v]
        after += [u for t in graph.ops[problem.ops[v]].inputs for u in writers.get(storage[t], ()) if u < v]
        after += [place[k] for k in graph.ops[problem.ops[v]].after if k in place]
        after += range(problem.split) if v >= problem.split else ()
        _hoist(line, v, set(after))
    return [problem.ops[v] for v in line]


def _writers(problem: Problem) -> dict[int, list[int]]:
    """Operators of the problem that make, update or give a view of each storage of the graph."""
    graph = problem.graph
    storage = graph.storages()
    found: dict[int, list[int]] = {}
    for v, k in enumerate(problem.ops):
        op = graph.ops[k] if k >= 0 else None
        for t in (*op.outputs, *(op.inputs[j] for j in op.attributes.get("updates", ()))) if op else ():
            found.setdefault(storage[t], []).append(v)
    return found


def _movable(problem: Problem, v: int) -> bool:
    op = problem.graph.ops[problem.ops[v]]
    fixed = any(op.attributes.get(name) for name in ("random", "once", "updates"))
    alone = all(problem.producer[s] == v for s in problem.writes[v])
    return problem.again[v] and alone and not fixed and not set(op.inputs) & set(op.outputs)


def _hoist(line: list[int], v: int, after: Collection[int]) -> None:
    """Move an operator to right after the last of those it must follow."""
    at = line.index(v)
    to = max((k + 1 for k in range(at) if line[k] in after), default=0)
    if to < at:
        line.insert(to, line.pop(at))
