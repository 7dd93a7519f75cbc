"""Bounds by cases: of two heavy operators that may run in either order, one runs first.

A cut is cheap where much of the step can run before it: at the peak of one loss, the backward of another loss
may be over. But that has a peak of its own, and runs before the first or after it. In each case the first of
them has all of the others behind it:

    c first:  before[c] ──▶ c ──▶ h ──▶ ...          h first:  before[h] ──▶ h ──▶ c ──▶ ...

Every valid program is one of a case, so the least bound of the cases holds for all of them. The case with the
least bound is split again, as long as its solution runs a heavy operator before its cut.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from lowtide.plan.bounds.cut import CutProblem, CutResult, Effort, solve_cuts
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.problem.precedence import bits

__all__ = ["CaseResult", "by_cases", "rival"]

_SPLITS = 4
"""Cases are split so often."""
_WORTH = 0.01
"""An operator is worth two cases if that keeps so much of what is too much live, as a share."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What is proven by cases."""

    bound: int
    """No valid program inside the budget spends less; only meaningful if ``feasible``."""
    feasible: bool
    """False: no case has a program that fits the budget."""


@dataclass(frozen=True, slots=True)
class _Case:
    relaxation: Relaxation
    """It has the order of the operators that the case is about."""
    cut: int
    result: CutResult


def by_cases(asked: CutProblem, effort: Effort, known: CutResult | None = None) -> CaseResult:
    """The bound of a cut program with one cut and a relaxation, by cases; ``known`` is its result, if solved.

    The programs of the cases have the seconds of the effort together, and the first two a half each.
    """
    (cut,), relaxation = asked.cuts, asked.relaxation
    if relaxation is None:
        raise AssertionError("bounds by cases are for every order")
    known = known or CutResult(0, feasible=True, solved=False, events=None)
    if not known.feasible:
        return CaseResult(0, feasible=False)
    deadline = time.monotonic() + effort.seconds
    cases = [_Case(relaxation, cut, known)]
    for _ in range(_SPLITS):
        case = min(cases, key=lambda case: case.result.bound)
        other = rival(case.relaxation, asked.budget, case.cut, case.result)
        left = deadline - time.monotonic()
        if other is None or left <= 0:
            break
        cases.remove(case)
        for first, then in ((case.cut, other), (other, case.cut)):
            there = ordered(case.relaxation, first, then)
            seconds = min(effort.seconds / 2, max(0.1, deadline - time.monotonic()))
            program = replace(asked, cuts=(first,), relaxation=there)
            result = solve_cuts(program, replace(effort, seconds=seconds))
            if result.feasible:
                bound = max(result.bound, case.result.bound)
                cases.append(_Case(there, first, replace(result, bound=bound)))
        if not cases:
            return CaseResult(0, feasible=False)
    return CaseResult(min(case.result.bound for case in cases), feasible=True)


def rival(relaxation: Relaxation, budget: int, cut: int, result: CutResult | None = None) -> int | None:
    """The operator that, first or not, leaves most live at the first of the two; None: no such matters.

    Of those that may run before the cut or after it; with the solution of a cut program, of those that it
    runs before the cut. What they free is not live at the cut. If one of them runs behind it, some of that
    is; if it runs first, all is that is live there.
    """
    order = relaxation.precedence
    known = order.before[cut] | order.after[cut] | 1 << cut | relaxation.optional
    early = (1 << len(order.before)) - 1 & ~known
    if result is not None and result.events is not None:
        runs = result.order if result.order is not None else range(len(order.before))
        early &= sum(1 << v for v in runs[: runs.index(cut)])
    if not early:
        return None
    live = _Live(relaxation)
    plain = live.at(cut, order.before[cut])
    least = live.at(cut, order.before[cut] | early)
    worth = least + _WORTH * (max(plain, least) - budget)
    found = None
    for v in bits(early):
        first = live.at(v, order.before[v])
        if first > worth:  # else it cannot matter
            behind = live.at(cut, (order.before[cut] | early) & ~(order.after[v] | 1 << v))
            if min(first, behind) > worth:
                worth, found = min(first, behind), v
    return found


def ordered(relaxation: Relaxation, first: int, then: int) -> Relaxation:
    """The relaxation for the programs in which one operator runs before another."""
    order = relaxation.precedence
    above, below = order.before[first] | 1 << first, order.after[then] | 1 << then
    before = tuple(mask | above if below >> v & 1 else mask for v, mask in enumerate(order.before))
    after = tuple(mask | below if above >> v & 1 else mask for v, mask in enumerate(order.after))
    return replace(relaxation, precedence=replace(order, before=before, after=after), only_order=False)


class _Live:
    """What is live while an operator first runs, where nothing runs again."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.problem = problem = relaxation.problem
        self.readers = [sum(1 << r for r in set(found)) for found in problem.readers]

    def at(self, op: int, had: int) -> int:
        """The bytes that are live if these operators have run before."""
        problem = self.problem
        live = problem.fixed[op] + problem.workspace[op]
        for s, producer in enumerate(problem.producer):
            there = producer < 0 or had >> producer & 1
            if producer == op or (there and (problem.kept[s] or self.readers[s] & ~had)):
                live += problem.bytes[s]
        return live
