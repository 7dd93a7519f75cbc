"""What no valid program can beat: the smallest budget, and the time spent on running again at a budget.

Bounds hold for every order of the operators that gives the same values, and however often and wherever an
operator runs again: they are those of the relaxation (:mod:`lowtide.plan.bounds.relaxation`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from lowtide.plan.bounds.cut import CutProblem, CutResult, Effort, solve_cuts
from lowtide.plan.bounds.first_heavy import by_cases
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.problem.precedence import bits
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event, evaluate, order

__all__ = ["Cuts", "chained", "smallest_conceivable", "surely_infeasible", "working_sets"]

_HEAVY = 8
"""So many operators have their own working sets looked at where a budget may be too small for any plan."""
_NEAR = 4
"""A cut that does not fit among the others is looked for so many operators before and behind."""


def smallest_conceivable(relaxation: Relaxation, *, offload: bool = False) -> int:
    """No budget below this can work: the largest working set of one operator beside what stays anyway.

    What is there when the step begins and when it ends counts as well. With ``offload`` storages from outside
    may be away while nobody reads them.
    """
    problem = relaxation.problem
    given = sum(problem.bytes[s] for s, p in enumerate(problem.producer) if p < 0)
    stays = (s for s, keep in enumerate(problem.kept) if keep)
    end = sum(problem.bytes[s] for s in (*stays, *relaxation.at_end))
    leaves = relaxation.away + min(problem.fixed, default=problem.resident)
    return max(leaves + given, leaves + end, *working_sets(relaxation, offload=offload), 0)


def working_sets(relaxation: Relaxation, *, offload: bool = False) -> list[int]:
    """For each operator the bytes that are live while it first runs, in any order of the others."""
    problem, before = relaxation.problem, relaxation.precedence.before
    size = len(problem.ops)
    made = np.zeros(size, dtype=np.int64)
    """Bytes that stay once an operator has run."""
    for s, (producer, keep) in enumerate(zip(problem.producer, problem.kept, strict=True)):
        if keep and producer >= 0:
            made[producer] += problem.bytes[s]
    found = []
    for op in range(size):
        own = {*problem.reads[op], *problem.writes[op]}
        need = problem.fixed[op] + problem.workspace[op]
        need += sum(problem.bytes[s] for s in own if not problem.kept[s] or problem.producer[s] == op)
        if problem.over[op] >= 0:
            need -= problem.bytes[problem.over[op]]
        found.append(need + int(_members(before[op], size) @ made))
    if not offload:
        _add_given(found, relaxation)
    for op in bits(relaxation.optional):
        found[op] = 0
    return found


def _add_given(found: list[int], relaxation: Relaxation) -> None:
    """Storages from outside are there before whoever reads them."""
    problem, before = relaxation.problem, relaxation.precedence.before
    for s, producer in enumerate(problem.producer):
        if producer < 0:
            readers = problem.readers[s]
            for op in bits(_union(before[r] for r in readers)):
                if op not in readers:
                    found[op] += problem.bytes[s]


def _union(masks: Iterable[int]) -> int:
    total = 0
    for mask in masks:
        total |= mask
    return total


def _members(mask: int, size: int) -> np.ndarray:
    """The numbers below ``size`` that are in a bit mask, as zeros and ones."""
    packed = np.frombuffer(mask.to_bytes(size // 8 + 1, "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little", count=size)


def surely_infeasible(problem: Problem, relaxation: Relaxation, budget: int, *, seconds: float = 1.0) -> bool:
    """Whether it can be proven that no program fits: around the instant with the largest working set.

    What is held there leaves little to start from, and heavy operators that must run again right after find
    no room beside what that instant has made.
    """
    sets = working_sets(relaxation)
    most = max(range(len(sets)), key=sets.__getitem__)
    cuts = [most]
    for t in range(most + 1, len(sets)):
        if len(cuts) < 3 and chained(relaxation, cuts, t):
            cuts.append(t)
    able = [op for op in range(problem.split) if relaxation.problem.again[op]]
    heavy = sorted(able, key=lambda op: -sets[op])[:_HEAVY]
    asked = CutProblem(problem, budget, cuts, heavy, relaxation=relaxation)
    return not solve_cuts(asked, Effort(nodes=1_000, seconds=seconds)).feasible


def chained(relaxation: Relaxation | None, cuts: Iterable[int], op: int) -> bool:
    """Whether an operator can be a cut besides others: in every order it runs before or after each."""
    if relaxation is None:
        return True
    between = relaxation.precedence.chained
    return not relaxation.optional >> op & 1 and all(op == cut or between(cut, op) for cut in cuts)


class Cuts:
    """A growing set of cuts; each solve adds those where its own solution exceeds the budget.

    Without a relaxation the bound holds for schedules that keep the problem's order.
    """

    def __init__(self, problem: Problem, budget: int, peak_at: int, relaxation: Relaxation | None) -> None:
        self.problem = problem
        self.budget = budget
        self.relaxation = relaxation
        self.cuts = {peak_at}
        self.heavy: set[int] = set()
        """Operators whose own working set, where they run again, is part of the program."""
        self.bound = 0
        self.feasible = True

    def solve(self, effort: Effort, start: Collection[Event] | None = None) -> CutResult:
        """Solve the program of the present cuts, and keep its bound if it is the best so far."""
        asked = CutProblem(self.problem, self.budget, self.cuts, self.heavy, relaxation=self.relaxation)
        result = solve_cuts(asked, effort, start=start)
        self.feasible = self.feasible and result.feasible
        self.bound = max(self.bound, result.bound)
        return result

    def split(self, effort: Effort, known: CutResult) -> None:
        """Where there is one cut, whose program is solved: a better bound by cases, for every order."""
        if self.relaxation is not None and len(self.cuts) == 1 and known.feasible:
            asked = CutProblem(self.problem, self.budget, self.cuts, relaxation=self.relaxation)
            result = by_cases(asked, effort, known)
            self.feasible = self.feasible and result.feasible
            self.bound = max(self.bound, result.bound)

    def tighten(self, events: Iterable[Event], most: int = 1, there: Problem | None = None) -> int:
        """Add cuts at the instants where a schedule needs most; how many were new.

        ``there`` is the problem in the order that the schedule is for, where that is another.
        """
        own = list(range(len(self.problem.ops)))  # several may stand for no operator of the graph
        if there is not None and there is not self.problem:
            number = {op: v for v, op in enumerate(self.problem.ops)}
            own = [number[op] for op in there.ops]
        there = there or self.problem
        outcome = evaluate(there, events)
        runs = order(there, outcome.events)
        ranked = sorted(range(len(runs)), key=lambda k: -outcome.live[k])
        added = 0
        for k in ranked:
            if outcome.live[k] <= self.budget and added:
                break
            if self._added(own[runs[k][0]], own[runs[k][1]], outcome.live[k] > self.budget, bool(added)):
                added += 1
                if added >= most:
                    break
        return added

    def _added(self, instant: int, op: int, exceeds: bool, others: bool) -> bool:
        """Add a cut at an instant, or where there is one, the operator that runs again there as heavy."""
        if op not in self.heavy and instant in self.cuts and op != instant and exceeds:
            before = self._near(instant - 1)
            self.heavy.add(op)
            self.cuts |= {before} if before is not None else set()
            return True
        near = self._near(instant)
        if near is None or near in self.cuts:
            return False
        if others and any(abs(near - other) <= 1 for other in self.cuts):
            return False
        self.cuts.add(near)
        return True

    def _near(self, instant: int) -> int | None:
        """The operator nearest to an instant that can be a cut beside the others."""
        for distance in range(_NEAR):
            for op in (instant - distance, instant + distance):
                if 0 <= op < len(self.problem.ops) and chained(self.relaxation, self.cuts, op):
                    return op
        return None
