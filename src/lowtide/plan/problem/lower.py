"""From a schedule to a Program: runs in order, views made just in time, drops after last uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.graph import RESIDENT_ROLES, Graph, Phase, Role
from lowtide.plan.problem.problem import Problem, is_view
from lowtide.plan.problem.schedule import Event, evaluate, order
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Drop, Fetch, Instruction, Program, Run, Send
from lowtide.plan.program.memory import saved_for
from lowtide.plan.program.short_reruns import with_joined
from lowtide.plan.program.simple import kept_throughout, storages_kept

__all__ = ["lower"]


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor is held up to here, whoever reads it."""

    tensor: int


_Line = Run | Send | Fetch | _Held


def lower(problem: Problem, events: Iterable[Event]) -> Program:
    """The Program of a schedule; its peak is never above what the schedule promises."""
    useful = evaluate(problem, events).events
    lines, forward = _Views(problem).lines(order(problem, useful))
    program = _with_drops(problem, lines, forward)
    if problem.able:
        program = with_in_place(problem.graph, program, problem.able)
    return with_joined(problem.graph, program, problem.short) if problem.short else program


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
        updated = set(graph.updated)
        self.old_value = {
            k
            for k, t in enumerate(graph.tensors)
            if t.role in RESIDENT_ROLES and (k in updated or t.role is Role.BUFFER)
        }
        self.held: dict[int, dict[int, None]] = {}
        """Views that exist, by storage."""
        self.found: list[_Line] = []

    def lines(self, order: Sequence[Event]) -> tuple[list[_Line], int]:
        """What happens in order, and how much of it belongs to forward."""
        graph, problem = self.graph, self.problem
        pending = list(reversed(self.kept_views))
        forward = 0
        fetched = dict(problem.fetched)
        following = _following(problem.ops)
        leaving = self._leaving()
        for instant, op in order:
            if instant >= problem.split and not forward:
                forward = self._end_of_forward(pending)
            while pending and pending[-1] < following[instant]:
                self._make(pending.pop())
            k = problem.ops[op]
            if k < 0:
                self._aside(op, fetched)
                continue
            for t in graph.ops[k].reads:
                self._ensure(t)
            short = instant != op and k in problem.short and bool(saved_for(graph.ops[k]))
            self.found.append(Run(k, short=short))
            for t in graph.ops[k].outputs[:1] if short else graph.ops[k].outputs:
                if t not in graph.ops[k].inputs:
                    self.held[self.storage[t]] = {}
            if instant == op:
                self.found += [Send(problem.owner[s]) for s in leaving.get(op, ())]
        if not forward:
            forward = self._end_of_forward(pending)
        while pending:
            self._make(pending.pop())
        return self.found, forward

    def _leaving(self) -> dict[int, list[int]]:
        """Storages whose copy to the host starts after an operator: the last one to write before they go."""
        graph, problem = self.graph, self.problem
        fetched = dict(problem.fetched)
        aside = [k for k, op in enumerate(problem.ops) if op < 0 and k not in fetched]
        gone = {s: k for k in aside for s in problem.reads[k]}
        written: dict[int, list[int]] = {}
        for k, op in enumerate(problem.ops):
            for t in graph.ops[op].changes if op >= 0 else ():
                written.setdefault(self.storage[t], []).append(k)
        found: dict[int, list[int]] = {}
        for s in problem.sent:
            later = [k for k in written.get(problem.owner[s], ()) if problem.producer[s] < k < gone[s]]
            found.setdefault(max(later, default=problem.producer[s]), []).append(s)
        return found

    def _aside(self, op: int, fetched: dict[int, int]) -> None:
        """A pause, a copy back, or the end of a copy to the host."""
        if op in fetched:
            self.found.append(Fetch(fetched[op]))
            self.held[self.storage[fetched[op]]] = {}
        else:
            self.found += [_Held(self.problem.owner[s]) for s in self.problem.reads[op]]

    def _end_of_forward(self, pending: list[int]) -> int:
        """Make what forward returns; views of leaves that the step updates are not handed on."""
        while pending and self.graph.ops[pending[-1]].phase is Phase.FORWARD:
            self._make(pending.pop())
        for leaf in self.old_value:
            self.held.pop(self.storage[leaf], None)
        return len(self.found)

    def _ensure(self, tensor: int) -> None:
        if tensor in self.maker and tensor not in self.held.get(self.storage[tensor], ()):
            self._make(self.maker[tensor])

    def _make(self, view: int) -> None:
        op = self.graph.ops[view]
        for t in op.reads:
            self._ensure(t)
        if all(t in self.held.get(self.storage[t], ()) for t in op.outputs):
            return
        self.found.append(Run(view))
        for t in op.outputs:
            self.held.setdefault(self.storage[t], {})[t] = None


def _following(ops: Sequence[int]) -> list[int]:
    """For each operator of a problem the first of the graph's operators that it is, or that come after it."""
    found, first = list(ops), max(ops, default=0) + 1
    for k in reversed(range(len(found))):
        first = found[k] if 0 <= found[k] < first else first
        found[k] = first
    return found


def _with_drops(problem: Problem, lines: Sequence[_Line], forward: int) -> Program:
    """Lines, with each tensor dropped after its last use before it is made again, or at all."""
    graph = problem.graph
    kept = set(kept_throughout(graph))
    staying = storages_kept(graph)
    needed: set[int] = set()
    drops: list[list[int]] = []
    for line in reversed(lines):
        made, used = _touched(graph, line)
        drops.append([t for t in dict.fromkeys((*used, *made)) if t not in kept and t not in needed])
        needed.difference_update(t for t in made if t not in used and t not in staying)
        needed.update(used)
    drops.reverse()
    parts: tuple[list[Instruction], list[Instruction]] = ([], [])
    for position, line in enumerate(lines):
        part = parts[position >= forward]
        if not isinstance(line, _Held):
            part.append(line)
        if drops[position]:
            part.append(Drop(tuple(drops[position])))
    return Program(tuple(parts[0]), tuple(parts[1]))


def _touched(graph: Graph, line: _Line) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tensors that a line makes, and those it needs."""
    if isinstance(line, Run):
        op = graph.ops[line.op]
        if line.short:
            return op.outputs[:1], (*op.reads_again, *saved_for(op))
        bases = [b for t in op.outputs if (b := graph.tensors[t].alias) is not None]
        return op.outputs, (*op.reads, *bases, *(t for t in op.outputs if t in op.inputs))
    if isinstance(line, Fetch):
        return (line.tensor,), ()
    return (), (line.tensor,)
