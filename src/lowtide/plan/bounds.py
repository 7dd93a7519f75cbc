"""What no schedule can beat: the smallest budget, and the time spent on running again at a budget.

All bounds hold for schedules that keep the mandatory operators in their order, and in which an operator
runs again as often and wherever its inputs are there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lowtide.plan.cut import CutResult, solve_cuts
from lowtide.plan.problem import Problem
from lowtide.plan.schedule import Event, Outcome, evaluate, order

__all__ = ["Cuts", "smallest_conceivable", "surely_infeasible"]

_HEAVY = 8
"""So many operators have their own working sets looked at where a budget may be too small for any plan."""


def smallest_conceivable(problem: Problem) -> int:
    """No budget below this can work: the largest working set of one operator beside what stays anyway."""
    return max((own for own in working_sets(problem)), default=problem.resident)


def working_sets(problem: Problem) -> list[int]:
    """For each mandatory operator the bytes that are live while it runs, whatever is planned."""
    last_given = {
        s: max(readers, default=-1) for s, readers in enumerate(problem.readers) if problem.producer[s] < 0
    }
    given: dict[int, int] = {s: last for s, last in last_given.items() if last >= 0}
    ends: dict[int, list[int]] = {}
    for s, last in given.items():
        ends.setdefault(last, []).append(s)
    staying = sum(problem.bytes[s] for s in given)
    held = set(given)
    found = []
    for op in range(len(problem.ops)):
        own = {*problem.reads[op], *problem.writes[op]} - held
        need = problem.fixed[op] + problem.workspace[op] + staying + sum(problem.bytes[s] for s in own)
        if problem.over[op] >= 0:
            need -= problem.bytes[problem.over[op]]
        found.append(need)
        for s in problem.writes[op]:
            if problem.kept[s]:
                held.add(s)
                staying += problem.bytes[s]
        for s in ends.get(op, ()):
            held.discard(s)
            staying -= problem.bytes[s]
    return found


def surely_infeasible(problem: Problem, budget: int, *, seconds: float = 1.0) -> bool:
    """Whether it can be proven that no schedule fits: around the instant with the largest working set.

    What is held there leaves little to start from, and heavy operators that must run again right after find
    no room beside what that instant has made.
    """
    sets = working_sets(problem)
    most = max(range(len(sets)), key=sets.__getitem__)
    cuts = [t for t in range(most, most + 3) if t < len(sets)]
    able = [op for op in range(problem.split) if problem.again[op]]
    heavy = sorted(able, key=lambda op: -sets[op])[:_HEAVY]
    return not solve_cuts(problem, budget, cuts, nodes=1_000, seconds=seconds, heavy=heavy).feasible


class Cuts:
    """A growing set of cuts; each solve adds those where its own solution exceeds the budget."""

    def __init__(self, problem: Problem, budget: int, plain: Outcome) -> None:
        self.problem = problem
        self.budget = budget
        self.cuts = {plain.peak_at}
        self.heavy: set[int] = set()
        """Operators whose own working set, where they run again, is part of the program."""
        self.bound = 0
        self.feasible = True

    def solve(
        self, *, nodes: int, seconds: float, slack: float = 0.0, start: Collection[Event] | None = None
    ) -> CutResult:
        """Solve the program of the present cuts, and keep its bound if it is the best so far."""
        result = solve_cuts(
            self.problem,
            self.budget,
            sorted(self.cuts),
            nodes=nodes,
            seconds=seconds,
            slack=slack,
            heavy=self.heavy,
            start=start,
        )
        self.feasible = self.feasible and result.feasible
        self.bound = max(self.bound, result.bound)
        return result

    def tighten(self, events: Iterable[Event], most: int = 1) -> int:
        """Add cuts at the instants where a schedule needs most; how many were new."""
        outcome = evaluate(self.problem, events)
        runs = order(self.problem, outcome.events)
        ranked = sorted(range(len(runs)), key=lambda k: -outcome.live[k])
        added = 0
        for k in ranked:
            if outcome.live[k] <= self.budget and added:
                break
            instant, op = runs[k]
            if (
                op not in self.heavy
                and instant in self.cuts
                and op != instant
                and outcome.live[k] > self.budget
            ):
                self.heavy.add(op)
                self.cuts.add(instant - 1)
                added += 1
                if added >= most:
                    break
                continue
            if instant in self.cuts or any(abs(instant - other) <= 1 for other in self.cuts if added):
                continue
            self.cuts.add(instant)
            added += 1
            if added >= most:
                break
        return added
