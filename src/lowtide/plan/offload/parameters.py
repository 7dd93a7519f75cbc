"""Parameters and optimiser state that wait on the host while nobody reads them.

No operator of the step changes them, so one copy to the host serves every absence, and may start at any
time. For the search they take memory only while an operator reads them (``streamed``); what it finds then
gets as many absences as the budget asks for, each as short as the budget allows (``with_absences``):

    send p ─ run reads p ─ drop p ............ fetch p ─ run reads p ─ drop p ..... fetch p │ end of the step
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from lowtide.graph import Graph
from lowtide.plan.problem.problem import Problem
from lowtide.plan.program.copy_lanes import Lanes, Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Fetch, Instruction, Program, Run, Send
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import MOVABLE

__all__ = ["movable", "streamed", "with_absences"]


def movable(graph: Graph, offload: Collection[str], pinned: Collection[int] = ()) -> tuple[int, ...]:
    """Leaves that may leave the device: of the kinds allowed, not changed by the step, not ``pinned``."""
    roles = {MOVABLE[name] for name in offload}
    storage = graph.storages()
    stay = {storage[t] for t in graph.updated}
    stay |= {storage[t] for t in graph.returned}
    stay |= {storage[t] for op in graph.ops for t in set(op.inputs) & set(op.outputs)} | set(pinned)
    tensors = enumerate(graph.tensors)
    return tuple(k for k, t in tensors if t.role in roles and t.alias is None and t.bytes and k not in stay)


def streamed(problem: Problem, leaves: Collection[int], *, crossing: bool = True) -> Problem:
    """The problem in which these leaves take memory only while an operator reads them.

    Without ``crossing`` all of them are there while the last operator of forward runs.
    """
    graph = problem.graph
    storage, wanted = graph.storages(), frozenset(leaves)
    size = {leaf: allocated_bytes(graph.tensors[leaf]) for leaf in wanted}
    everything = sum(size.values())
    own = [
        sum(size[leaf] for leaf in {storage[t] for t in graph.ops[op].inputs} & wanted) for op in problem.ops
    ]
    fixed = [taken - everything for taken in problem.fixed]
    if not crossing and 0 < problem.split < len(problem.ops):
        fixed[problem.split - 1] = problem.fixed[problem.split - 1] - own[problem.split - 1]
    return replace(
        problem,
        fixed=tuple(fixed),
        resident=problem.resident - everything,
        workspace=tuple(extra + more for extra, more in zip(problem.workspace, own, strict=True)),
    )


@dataclass(slots=True)
class _Absence:
    """A leaf is gone from one run on, and its copy back starts before another; runs count from 0."""

    leaf: int
    size: int
    start: int
    end: int
    gone: int = 0
    back: int = 0
    slack: float = inf
    """Seconds of the absence that copying leaves over."""


def with_absences(
    graph: Graph,
    program: Program,
    leaves: Collection[int],
    budget: int,
    costs: Costs,
    *,
    link: Link | None = None,
    crossing: bool = True,
) -> Program:
    """The program with leaves away where it would exceed the budget otherwise, as far as they can help.

    Without ``crossing`` every leaf is on the device between forward and backward.
    """
    timeline = simulate(
        graph,
        program,
        workspace_bytes=costs.workspace_bytes,
        seconds=costs.seconds,
        short=costs.short,
        lanes=Lanes(graph, link, costs.wire_seconds),
    )
    runs = [line for line in program.instructions if isinstance(line, Run)]
    forward = sum(isinstance(line, Run) for line in program.forward)
    begins = [0.0, *accumulate(timeline.seconds or [0.0] * len(runs))]
    search = _Absences(graph, runs, list(timeline.live_bytes), begins, budget, link)
    chosen = search.chosen(_gaps(graph, runs, leaves, None if crossing else forward - 1))
    return _inserted(program, search.timed(chosen), search)


def _gaps(
    graph: Graph, runs: Sequence[Run], leaves: Collection[int], there: int | None
) -> dict[int, list[_Absence]]:
    """For each leaf the stretches of runs that do not use it; all are used at the run ``there``."""
    storage, wanted = graph.storages(), frozenset(leaves)
    uses: dict[int, list[int]] = {leaf: [] for leaf in sorted(wanted)}
    for k, run in enumerate(runs):
        op = graph.ops[run.op]
        touched = {storage[t] for t in (*op.inputs, *op.outputs)} & wanted
        for leaf in uses if k == there else touched:
            uses[leaf].append(k)
    found: dict[int, list[_Absence]] = {}
    for leaf, used in uses.items():
        size = allocated_bytes(graph.tensors[leaf])
        edges = zip([0, *(k + 1 for k in used)], [*used, len(runs)], strict=True)
        found[leaf] = [_Absence(leaf, size, start, end) for start, end in edges if start < end]
    return found


class _Absences:
    """Chooses absences for a line of runs and gives them times."""

    def __init__(
        self,
        graph: Graph,
        runs: Sequence[Run],
        live: list[int],
        begins: list[float],
        budget: int,
        link: Link | None,
    ) -> None:
        self.graph, self.runs, self.live, self.begins, self.budget = graph, runs, live, begins, budget
        self.out = (lambda size: size / link.to_host) if link else (lambda _: 0.0)
        self.back = (lambda size: size / link.to_device) if link else (lambda _: 0.0)

    def chosen(self, gaps: dict[int, list[_Absence]]) -> list[_Absence]:
        """Absences until no run exceeds the budget or none helps; those without waiting, and large, first."""
        live, taken = self.live, dict[tuple[int, int], _Absence]()
        sent: set[int] = set()
        starts = {leaf: [gap.start for gap in found] for leaf, found in gaps.items()}
        helpless: set[int] = set()
        while True:
            over = [k for k, now in enumerate(live) if now > self.budget and k not in helpless]
            if not over:
                return list(taken.values())
            worst = max(over, key=live.__getitem__)
            best: _Absence | None = None
            for leaf, found in gaps.items():
                at = bisect_right(starts[leaf], worst) - 1
                gap = found[at] if at >= 0 else None
                if gap is None or worst >= gap.end or (leaf, gap.start) in taken:
                    continue
                copies = self.back(gap.size) + (0.0 if leaf in sent else self.out(gap.size))
                gap.slack = self.begins[gap.end] - self.begins[gap.start] - copies
                if best is None or (min(gap.slack, 0.0), gap.size) > (min(best.slack, 0.0), best.size):
                    best = gap
            if best is None:
                helpless.add(worst)
                continue
            taken[best.leaf, best.start] = best
            sent.add(best.leaf)
            self._change(best.start, best.end, -best.size)

    def timed(self, chosen: list[_Absence]) -> list[_Absence]:
        """The absences that are needed after all, each as short as budget and copies allow."""
        kept: list[_Absence] = []
        for one in sorted(chosen, key=lambda one: (one.slack, one.leaf, one.start)):
            if max(self.live[one.start : one.end]) + one.size <= self.budget:
                self._change(one.start, one.end, one.size)
            else:
                kept.append(one)
        self._come_back(kept)
        self._leave(kept)
        return kept

    def _come_back(self, kept: list[_Absence]) -> None:
        following = inf
        for one in sorted(kept, key=lambda one: (-one.end, -one.leaf)):
            following = min(self.begins[one.end], following) - self.back(one.size)
            wish = bisect_right(self.begins, following) - 1
            one.gone, one.back = one.start, one.end
            while one.back > max(wish, one.gone + 1) and self.live[one.back - 1] + one.size <= self.budget:
                one.back -= 1
                self.live[one.back] += one.size

    def _leave(self, kept: list[_Absence]) -> None:
        free, sent = 0.0, set[int]()
        for one in sorted(kept, key=lambda one: (one.start, one.leaf)):
            if one.leaf in sent:
                continue
            sent.add(one.leaf)
            free += self.out(one.size)
            wish = bisect_left(self.begins, free)
            while one.gone < min(wish, one.back - 1) and self.live[one.gone] + one.size <= self.budget:
                self.live[one.gone] += one.size
                one.gone += 1

    def sends(self, kept: list[_Absence]) -> list[tuple[int, int]]:
        """Before which run the copy of each leaf starts, in order: as late as it ends in time."""
        first: dict[int, int] = {}
        for one in kept:
            first[one.leaf] = min(first.get(one.leaf, one.gone), one.gone)
        found: list[tuple[int, int]] = []
        following = inf
        for leaf in sorted(first, key=lambda leaf: (-first[leaf], -leaf)):
            size = allocated_bytes(self.graph.tensors[leaf])
            following = min(self.begins[first[leaf]], following) - self.out(size)
            at = bisect_right(self.begins, following) - 1
            found.append((min(max(0, at), first[leaf]), leaf))
        return found[::-1]

    def _change(self, start: int, end: int, size: int) -> None:
        for k in range(start, end):
            self.live[k] += size


def _inserted(program: Program, kept: list[_Absence], search: _Absences) -> Program:
    """The program with the copies and drops of these absences."""
    before: dict[int, list[Instruction]] = {}
    for at, leaf in search.sends(kept):
        before.setdefault(at, []).append(Send(leaf))
    for one in sorted(kept, key=lambda one: (one.gone, one.leaf)):
        before.setdefault(one.gone, []).append(Drop((one.leaf,)))
    for one in sorted(kept, key=lambda one: (one.end, one.leaf)):
        before.setdefault(one.back, []).append(Fetch(one.leaf))
    parts: list[tuple[Instruction, ...]] = []
    run = 0
    for part in (program.forward, program.backward):
        lines: list[Instruction] = []
        for line in part:
            if isinstance(line, Run):
                lines += before.pop(run, ())
                run += 1
            lines.append(line)
        last = part is program.backward or not program.backward
        parts.append(tuple(lines + before.pop(run, [])) if last and run == len(search.runs) else tuple(lines))
    return Program(parts[0], parts[1])
