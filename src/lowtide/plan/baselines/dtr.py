"""Greedy online eviction: Kirisame et al., "Dynamic Tensor Rematerialization" (2021).

Operators run in program order. Where memory is short, the storage with the least h_DTR is let go: the cost of
making it and its evicted neighbourhood again, over its bytes times how long nobody has touched it. What was
let go is made again, recursively, when somebody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import PlanError
from lowtide.graph import Graph, Op
from lowtide.plan.baselines.common import homes, unrepeatable, within
from lowtide.plan.program.instructions import Program, Run
from lowtide.plan.program.memory import Memory, allocated_bytes
from lowtide.plan.program.simple import forward_count, kept_throughout, with_drops
from lowtide.units import format_bytes

__all__ = ["dtr"]


def dtr(
    graph: Graph, seconds: Sequence[float], budget: int, *, workspace_bytes: Sequence[int] = ()
) -> Program:
    """What eviction as memory runs short comes to; it knows nothing of what is read later."""

    def plan(asked: int) -> Program:
        return _Online(graph, seconds, asked, workspace_bytes).program()

    return within(graph, budget, plan, workspace_bytes=workspace_bytes)


class _Online:
    def __init__(
        self, graph: Graph, seconds: Sequence[float], budget: int, workspace_bytes: Sequence[int]
    ) -> None:
        self.graph, self.seconds, self.budget, self.workspace = graph, seconds, budget, workspace_bytes
        self.memory = Memory(graph)
        self.storage = graph.storages()
        self.home = homes(graph, self.storage)
        once = unrepeatable(graph)
        stay = {self.storage[t] for t in kept_throughout(graph)}
        self.evictable = {s for s, k in self.home.items() if k not in once and s not in stay}
        self.evictable = {s for s in self.evictable if graph.tensors[s].bytes}
        self.fixed = stay | {s for s in self.home if self.home[s] in once}
        self.producer = {t: k for k, op in enumerate(graph.ops) for t in op.outputs}
        self.on: dict[int, list[int]] = {}
        for t, s in enumerate(self.storage):
            self.on.setdefault(s, []).append(t)
        self.uses: dict[int, int] = {}
        for op in graph.ops:
            for s in {self.storage[t] for t in op.reads}:
                self.uses[s] = self.uses.get(s, 0) + 1
        self.parents: dict[int, set[int]] = {s: set() for s in self.home}
        self.children: dict[int, set[int]] = {s: set() for s in self.home}
        for s, k in self.home.items():
            for parent in {self.storage[t] for t in graph.ops[k].reads} & set(self.home):
                self.parents[s].add(parent)
                self.children[parent].add(s)
        self.evicted: set[int] = set()
        self.candidates: set[int] = set()
        self.touched: dict[int, float] = {}
        self.around: dict[int, float] = {}
        """Seconds to make a held storage again with its evicted neighbourhood, while that is the same."""
        self.clock = 0.0
        self.tick = sum(seconds) / max(len(seconds), 1) or 1.0
        self.runs: list[int] = []

    def program(self) -> Program:
        """Every operator in order, with whatever has to run again before it."""
        cut = 0
        for k, op in enumerate(self.graph.ops):
            self._run(k)
            for s in {self.storage[t] for t in op.reads}:
                self.uses[s] -= 1
            for s in {self.storage[t] for t in (*op.reads, *op.outputs)} - self.fixed:
                if not self.uses.get(s):
                    self._let_go(s)
            cut = len(self.runs) if k + 1 == forward_count(self.graph) else cut
        return Program(*with_drops(self.graph, self.runs[:cut], self.runs[cut:]))

    def _run(self, mandatory: int) -> None:
        """An operator, after those that make what it reads; what they have made so far is locked."""
        held = self.memory.storage_of
        stack = [mandatory]
        while stack:
            op = self.graph.ops[stack[-1]]
            reads = op.reads if stack[-1] == mandatory else op.reads_again
            missing = next((t for t in reads if t not in held), None)
            if missing is not None:
                stack.append(self.producer[missing])
                continue
            self._make_room(stack, op)
            self._perform(stack.pop(), op)

    def _perform(self, index: int, op: Op) -> None:
        self.memory.run(Run(index))
        self.runs.append(index)
        self.clock += self.seconds[index] or self.tick
        for s in {self.storage[t] for t in (*op.reads, *op.outputs)}:
            self.touched[s] = self.clock
            if s in self.evicted:
                self._forget_around(s)
                self.evicted.discard(s)
            if s in self.evictable:
                self.candidates.add(s)

    def _make_room(self, stack: Sequence[int], op: Op) -> None:
        held, tensors = self.memory.storage_of, self.graph.tensors
        need = sum(allocated_bytes(tensors[t]) for t in op.outputs if tensors[t].alias is None)
        need -= sum(allocated_bytes(tensors[t]) for t in op.outputs if t in op.inputs)
        need += self.workspace[stack[-1]] if self.workspace else 0
        locked = {self.storage[t] for k in stack for t in self.graph.ops[k].reads if t in held}
        while self.memory.live + need > self.budget:
            free = self.candidates - locked
            if not free:
                raise PlanError(
                    f"eviction finds no room for {op.label!r} in a budget of {format_bytes(self.budget)}"
                )
            self._let_go(min(free, key=lambda s: (self._worth(s), s)))

    def _worth(self, s: int) -> float:
        """h_DTR: least is let go first."""
        if s not in self.around:
            found = self._evicted_along(s, self.parents) | self._evicted_along(s, self.children)
            self.around[s] = sum(self.seconds[self.home[e]] for e in found | {s})
        stale = self.clock - self.touched[s] + self.tick
        return self.around[s] / (self.graph.tensors[s].bytes * stale)

    def _evicted_along(self, s: int, edges: dict[int, set[int]]) -> set[int]:
        """Evicted storages that are reached over evicted ones."""
        found: set[int] = set()
        stack = [s]
        while stack:
            for near in edges[stack.pop()]:
                if near in self.evicted and near not in found:
                    found.add(near)
                    stack.append(near)
        return found

    def _let_go(self, s: int) -> None:
        for t in self.on[s]:
            if t in self.memory.storage_of:
                self.memory.release(t)
        self.candidates.discard(s)
        self.around.pop(s, None)
        if s in self.home:
            self.evicted.add(s)
            self._forget_around(s)

    def _forget_around(self, s: int) -> None:
        """An evicted storage comes or goes: held ones that reach it over evicted ones count anew."""
        seen = {s}
        stack = [s]
        while stack:
            one = stack.pop()
            for near in self.parents[one] | self.children[one]:
                if near in self.evicted and near not in seen:
                    seen.add(near)
                    stack.append(near)
                self.around.pop(near, None)
