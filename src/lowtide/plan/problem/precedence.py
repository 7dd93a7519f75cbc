"""Which operators must run before which, so that every operator reads the values of program order.

``before`` is what the values alone ask for: an operator runs first after those that made, or updated, what it
reads, and backward after forward. ``planned`` is what the planner keeps besides: operators whose order may
show in the result, such as random ones and those that change a tensor, stay in their order.

Operators have the numbers of a Problem; sets of them are bit masks. Views count with what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.graph import RESIDENT_ROLES, Graph, Phase
from lowtide.plan.problem.problem import Problem
from lowtide.plan.program.simple import only_views

__all__ = ["Precedence", "bits", "by_rank", "precedence"]


@dataclass(frozen=True)
class Precedence:
    """For each operator of a problem a set of others."""

    before: tuple[int, ...]
    """Those that must have run before its first run."""
    after: tuple[int, ...]
    """Those whose first run must wait for its own."""
    planned: tuple[int, ...]
    """Those that the planner runs before it."""

    def chained(self, u: int, v: int) -> bool:
        """Whether one of two operators must run before the other."""
        return bool((self.before[v] >> u | self.before[u] >> v) & 1)


def bits(mask: int) -> Iterator[int]:
    """The numbers of a bit mask."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def precedence(problem: Problem) -> Precedence:
    """The precedence of a problem without pauses and without trips to the host."""
    graph = problem.graph
    own = [0] * len(graph.ops)
    for v, k in enumerate(problem.ops):
        own[k] = 1 << v
    optional = [only_views(graph, op) for op in graph.ops]
    needed = [0 if names else mask for mask, names in zip(own, optional, strict=True)]
    late = [op.phase is not Phase.FORWARD for op in graph.ops]
    makers = _makers(graph)
    before, after = _closed(makers, needed, late)
    previous = -1
    for k, shows in enumerate(_shows(graph)):
        makers[k] += [other for other in graph.ops[k].after if other < k]
        if shows and own[k]:
            makers[k] += [previous] if previous >= 0 else []
            previous = k
    planned, _ = _closed(makers, own, late)
    ops = problem.ops
    return Precedence(*(tuple(masks[k] for k in ops) for masks in (before, after, planned)))


def by_rank(planned: Sequence[int], rank: Sequence[int]) -> list[int]:
    """Operators by rank, then by number, but for those that must come sooner: an order for the planner."""
    order: list[int] = []
    placed = 0
    for v in sorted(range(len(rank)), key=lambda v: (rank[v], v)):
        for u in bits((planned[v] | 1 << v) & ~placed):
            order.append(u)
            placed |= 1 << u
    return order


def _closed(
    makers: Sequence[Sequence[int]], own: Sequence[int], late: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """For each operator of the graph all before and all after it; those of forward come before the rest."""
    forward = sum(mask for mask, behind in zip(own, late, strict=True) if not behind)
    backward = sum(own) - forward
    before = [forward if behind else 0 for behind in late]
    after = [0 if behind else backward for behind in late]
    for k, found in enumerate(makers):
        for maker in found:
            before[k] |= before[maker] | own[maker]
    for k in reversed(range(len(makers))):
        for maker in makers[k]:
            after[maker] |= after[k] | own[k]
    return before, after


def _makers(graph: Graph) -> list[list[int]]:
    """For each operator those that made or updated what it reads; where several make it, none is told."""
    root = graph.storages()
    writers: dict[int, list[int]] = {}
    for k, op in enumerate(graph.ops):
        for t in dict.fromkeys(op.outputs):
            if t not in op.inputs:
                writers.setdefault(t, []).append(k)
    updates = _updates(graph, root)
    found: list[list[int]] = []
    for k, op in enumerate(graph.ops):
        bases = [b for t in op.outputs if (b := graph.tensors[t].alias) is not None]
        mine: dict[int, None] = {}
        for t in (*op.reads, *bases):
            made = writers.get(t, [])
            for maker in (*(made if len(made) == 1 else ()), *updates.get(root[t], ())):
                if maker < k:
                    mine[maker] = None
        found.append(list(mine))
    return found


def _updates(graph: Graph, root: Sequence[int]) -> dict[int, list[int]]:
    """Operators that update each storage in place, where each of them reads what it updates.

    Leaves are not among them: who reads one that is updated may get a copy of its old value.
    """
    found: dict[int, list[int]] = {}
    blind: set[int] = set()
    for k, op in enumerate(graph.ops):
        for t in set(op.inputs) & set(op.outputs):
            found.setdefault(root[t], []).append(k)
            if t not in op.reads:
                blind.add(root[t])
    return {
        s: ops for s, ops in found.items() if s not in blind and graph.tensors[s].role not in RESIDENT_ROLES
    }


def _shows(graph: Graph) -> list[bool]:
    """For each operator whether its place among others like it may show in the result."""
    root = graph.storages()
    changed = {root[t] for t in graph.updated}
    count: dict[int, int] = {}
    for op in graph.ops:
        changed |= {root[t] for t in set(op.inputs) & set(op.outputs)}
        changed |= {root[op.inputs[k]] for k in op.updates}
        for t in set(op.outputs):
            count[t] = count.get(t, 0) + 1
    changed |= {root[t] for t, times in count.items() if times > 1}
    return [
        not op.repeatable or not op.outputs or any(root[t] in changed for t in (*op.inputs, *op.outputs))
        for op in graph.ops
    ]
