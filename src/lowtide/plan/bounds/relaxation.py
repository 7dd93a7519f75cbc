"""relax(problem): what every valid program of a step needs at least, in any order of its operators.

A Problem has one order of the operators, and some rules of the planner: a gradient stays from its first
write on, an operator whose result is updated later runs once. A valid program need not keep these rules.
Bounds are proven for the relaxation, where only what the values themselves ask for is left:

- an operator runs first after those that made what it reads, and backward after forward;
- an operator runs again unless that changes a value, or the step says that it runs once;
- what the program must not drop stays once it is made; what it returns through a view is there at the end.

Operators and storages have the numbers of the Problem. Sets of operators are bit masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role
from lowtide.plan.problem.precedence import Precedence, precedence
from lowtide.plan.problem.problem import Problem
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.simple import kept_throughout, only_views
from lowtide.plan.program.simulate import kept_to_restore

__all__ = ["Relaxation", "relax", "skippable"]


@dataclass(frozen=True)
class Relaxation:
    """A Problem whose figures are at most those of any valid program, and the orders that are possible."""

    problem: Problem
    precedence: Precedence
    at_end: tuple[int, ...]
    """Storages that may come and go, and must be there when the step ends."""
    away: int
    """Bytes of leaves that are not counted, since they may be on the host while nobody reads them."""
    optional: int
    """Operators that a program may leave out: all they make are views."""
    only_order: bool
    """Whether nothing was relaxed but the order: each of its schedules is one of a Problem in that order."""


def skippable(graph: Graph) -> frozenset[int]:
    """Operators that a valid program may leave out: all they make are views, and nobody needs those."""
    names = [only_views(graph, op) for op in graph.ops]
    wanted = set(kept_throughout(graph))
    found = set()
    for k in reversed(range(len(graph.ops))):
        op = graph.ops[k]
        if names[k] and not wanted.intersection(op.outputs):
            found.add(k)
        else:
            wanted.update(op.reads)
            wanted.update(b for t in op.outputs if (b := graph.tensors[t].alias) is not None)
    return frozenset(found)


def relax(problem: Problem) -> Relaxation:
    """The relaxation of a problem without pauses and without trips to the host."""
    return _Relaxed(problem).relaxation()


class _Relaxed:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        graph = problem.graph
        self.root = graph.storages()
        self.leaf = [graph.tensors[r].role in RESIDENT_ROLES for r in self.root]
        self.number = {t: s for s, t in enumerate(problem.owner)}
        self.stay = set(kept_throughout(graph))
        self.names = [only_views(graph, op) for op in graph.ops]
        self.optional = sum(1 << v for v, k in enumerate(problem.ops) if self.names[k])
        self.writers: dict[int, list[int]] = {}
        """Operators that make each tensor anew; those that update it are not among them."""
        for k, op in enumerate(graph.ops):
            for t in dict.fromkeys(op.outputs):
                if t not in op.inputs:
                    self.writers.setdefault(t, []).append(k)
        leaves = (t for t in graph.tensors if t.role in RESIDENT_ROLES and t.alias is None)
        self.away = max(0, sum(map(allocated_bytes, leaves)) - problem.resident)
        self.unclear = {t for t in problem.owner if len(self.writers.get(t, ())) > 1}
        """Storages that several operators make: which of them a reader follows is not told."""

    def relaxation(self) -> Relaxation:
        problem, graph = self.problem, self.graph
        ops = [graph.ops[k] for k in problem.ops]
        reads: list[tuple[int, ...]] = []
        writes: list[tuple[int, ...]] = []
        again: list[bool] = []
        workspace: list[int] = []
        over: list[int] = []
        for v, op in enumerate(ops):
            if self.optional >> v & 1:
                reads.append(())
                writes.append(())
                again.append(False)
                workspace.append(0)
                over.append(-1)
                continue
            reads.append(self._reads(op))
            writes.append(tuple(s for s in problem.writes[v] if problem.owner[s] not in self.unclear))
            changes = set(op.inputs) & set(op.outputs) or not op.outputs or op.once
            again.append(problem.asked[v] and not changes)
            workspace.append(self._workspace(v, op))
            over.append(self._over(v, op))
        kept = tuple(
            keep and owner in self.stay and owner not in self.unclear
            for keep, owner in zip(problem.kept, problem.owner, strict=True)
        )
        returned = {self.root[t] for t in self.stay if t in self.writers}
        at_end = tuple(
            s
            for s, t in enumerate(problem.owner)
            if not kept[s] and problem.producer[s] >= 0 and t not in self.unclear and t in returned
        )
        fixed = self._fixed()
        relaxed = replace(
            problem,
            repeat=tuple(map(min, problem.repeat, problem.time)),
            again=tuple(again),
            reads=tuple(reads),
            writes=tuple(writes),
            workspace=tuple(workspace),
            over=tuple(over),
            kept=kept,
            fixed=fixed,
            charges=(),
            charged=((),) * len(ops),
        )
        same = not self.optional and not at_end and not problem.short and not self.unclear
        for name in ("repeat", "again", "reads", "writes", "workspace", "over", "kept", "fixed", "charges"):
            same = same and getattr(relaxed, name) == getattr(problem, name)
        return Relaxation(relaxed, precedence(problem), at_end, self.away, self.optional, same)

    def _reads(self, op: Op) -> tuple[int, ...]:
        """Storages that any run of an operator finds there; of several makers' results nothing is told."""
        touched = {self.root[t] for t in op.reads_again}
        touched |= {self.root[t] for t in op.outputs if t in op.inputs or self.root[t] != t}
        return tuple(sorted(self.number[s] for s in touched - self.unclear if s in self.number))

    def _workspace(self, v: int, op: Op) -> int:
        """What an operator takes besides storages that come and go; a result of several makers is in it."""
        problem, tensors = self.problem, self.graph.tensors
        extra = problem.workspace[v] + sum(
            problem.bytes[s] for s in problem.writes[v] if problem.owner[s] in self.unclear
        )
        if self.away:  # a leaf whose shape alone is asked for may be away
            away = {self.root[t] for t in op.inputs} - {self.root[t] for t in op.reads}
            extra -= sum(allocated_bytes(tensors[t]) for t in away if self.leaf[t])
        return max(0, extra)

    def _over(self, v: int, op: Op) -> int:
        """The storage that the first output may take over: the first input's, if nobody asks for it."""
        able = self.problem.ops[v] in self.problem.able and op.inputs and op.outputs
        if not able or 0 in op.shape_only or op.inputs[0] in self.stay:
            return -1
        source, made = self.root[op.inputs[0]], op.outputs[0]
        tensors = self.graph.tensors
        fits = allocated_bytes(tensors[source]) == allocated_bytes(tensors[made])
        known = source in self.number and source not in self.unclear
        return self.number[source] if known and fits and tensors[made].alias is None else -1

    def _fixed(self) -> tuple[int, ...]:
        """Leaves, and copies of those that operators of backward read as they were before the step."""
        problem, graph = self.problem, self.graph
        updated = set(graph.updated)
        copied = {
            t
            for k, op in enumerate(graph.ops)
            if op.phase is not Phase.FORWARD and not self.names[k]
            for t in op.reads_again
            if t in updated or graph.tensors[t].role is Role.BUFFER
        }
        base = problem.resident - self._untouched() + sum(allocated_bytes(graph.tensors[t]) for t in copied)
        behind = len(problem.ops) - problem.split
        return (base + kept_to_restore(graph),) * problem.split + (base,) * behind

    def _untouched(self) -> int:
        """Bytes of given tensors that nobody reads: the planner lets them stay."""
        touched = {t for op in self.graph.ops for t in (*op.outputs, *op.reads)}
        tensors = enumerate(self.graph.tensors)
        return sum(allocated_bytes(t) for k, t in tensors if k not in touched and not self.leaf[k])
