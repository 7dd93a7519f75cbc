"""From a schedule to a Program: runs in order, views made just in time, drops after last uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.graph import RESIDENT_ROLES, Phase, Role
from lowtide.plan.in_place import with_in_place
from lowtide.plan.plain import kept_throughout
from lowtide.plan.problem import Problem, is_view
from lowtide.plan.program import Drop, Instruction, Program, Run
from lowtide.plan.schedule import Event, evaluate, order

__all__ = ["lower"]


def lower(problem: Problem, events: Iterable[Event]) -> Program:
    """The Program of a schedule; its peak is never above what the schedule promises."""
    useful = evaluate(problem, events).events
    runs, forward = _Views(problem).runs(order(problem, useful))
    program = _with_drops(problem, runs, forward)
    return with_in_place(problem.graph, program, problem.able) if problem.able else program


class _Views:
    """Puts views among the runs of real operators: where one is first read while its storage lives."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.problem = problem
        self.graph = graph
        self.storage = graph.storages()
        views = [k for k, op in enumerate(graph.ops) if is_view(graph, op, self.storage)]
        self.maker = {t: k for k in views for t in graph.ops[k].outputs}
        kept = set(kept_throughout(graph))
        self.kept_views = [k for k in views if kept.intersection(graph.ops[k].outputs)]
        updated = set(graph.attributes.get("updated", ()))
        self.old_value = {
            k
            for k, t in enumerate(graph.tensors)
            if t.role in RESIDENT_ROLES and (k in updated or t.role is Role.BUFFER)
        }
        self.held: dict[int, dict[int, None]] = {}
        """Views that exist, by storage."""
        self.lines: list[int] = []

    def runs(self, order: Sequence[Event]) -> tuple[list[int], int]:
        """Operators of the graph in the order they run, and how many of them belong to forward."""
        graph, ops = self.graph, self.problem.ops
        pending = list(reversed(self.kept_views))
        forward = 0
        for instant, op in order:
            if instant >= self.problem.split and not forward:
                forward = self._end_of_forward(pending)
            while pending and pending[-1] < ops[instant]:
                self._make(pending.pop())
            k = ops[op]
            if k < 0:
                continue  # a pause
            for t in graph.ops[k].reads:
                self._ensure(t)
            self.lines.append(k)
            for t in graph.ops[k].outputs:
                if t not in graph.ops[k].inputs:
                    self.held[self.storage[t]] = {}
        if not forward:
            forward = self._end_of_forward(pending)
        while pending:
            self._make(pending.pop())
        return self.lines, forward

    def _end_of_forward(self, pending: list[int]) -> int:
        """Make what forward returns; views of leaves that the step updates are not handed on."""
        while pending and self.graph.ops[pending[-1]].phase is Phase.FORWARD:
            self._make(pending.pop())
        for leaf in self.old_value:
            self.held.pop(self.storage[leaf], None)
        return len(self.lines)

    def _ensure(self, tensor: int) -> None:
        if tensor in self.maker and tensor not in self.held.get(self.storage[tensor], ()):
            self._make(self.maker[tensor])

    def _make(self, view: int) -> None:
        op = self.graph.ops[view]
        for t in op.reads:
            self._ensure(t)
        if all(t in self.held.get(self.storage[t], ()) for t in op.outputs):
            return
        self.lines.append(view)
        for t in op.outputs:
            self.held.setdefault(self.storage[t], {})[t] = None


def _with_drops(problem: Problem, runs: Sequence[int], forward: int) -> Program:
    """Runs, with each tensor dropped after its last use before it is made again, or at all."""
    graph = problem.graph
    kept = set(kept_throughout(graph))
    needed: set[int] = set()
    drops: list[list[int]] = []
    for k in reversed(runs):
        op = graph.ops[k]
        bases = [b for t in op.outputs if (b := graph.tensors[t].alias) is not None]
        touched = dict.fromkeys((*op.reads, *bases, *op.outputs))
        drops.append([t for t in touched if t not in kept and t not in needed])
        needed.difference_update(t for t in op.outputs if t not in op.inputs)
        needed.update(op.reads, bases)
    drops.reverse()
    parts: tuple[list[Instruction], list[Instruction]] = ([], [])
    for position, k in enumerate(runs):
        lines = parts[position >= forward]
        lines.append(Run(k))
        if drops[position]:
            lines.append(Drop(tuple(drops[position])))
    return Program(tuple(parts[0]), tuple(parts[1]))
