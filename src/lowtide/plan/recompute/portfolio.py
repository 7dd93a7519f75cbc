"""recompute(problem, budget): the cheapest schedule that could be found inside a budget, with its proof.

A portfolio, in this order, each step skipped once the cost equals the bound:

1. store everything, if that fits;
2. for large problems in little time annealing from schedules that are given; for all but large ones, and for
   all where no bound is asked for, a short annealing, so that there is something to compare with; for tiny
   ones the shortest path of step 7;
3. for large problems with repeated blocks a cut program with one choice for all copies;
4. cut programs, growing by the cuts at which their own solution exceeds the budget: they give the bound,
   often the optimum itself, else good starts;
5. greedy by next use: nearly always feasible; then step 3 again in other ways, mended by a cold annealing;
6. annealing from the best starts, then again from the best plan;
7. for small problems the shortest path over what has run and what is held: exact, in any order of runs;
8. annealing in other orders of the operators, where time is left;
9. cut programs again, with cuts where the best plan touches the budget.

What greedy finds is annealed for a little while even where time is up; where nothing was found until then,
greedy is tried after all, and then the lowest peak.

Cut programs choose the order of the operators too, where it is open: their bound holds for every order, and
their schedules are tried, and annealed, in the order that they chose.

Work is counted in moves and nodes, not in seconds, so that the same seed gives the same plan; the time
limit is a deadline that cuts the work short on a slow machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from lowtide.errors import InfeasibleError
from lowtide.plan import time_shares
from lowtide.plan.bounds.cut import CutProblem, CutResult, Effort, Ties, solve_cuts
from lowtide.plan.bounds.lower_bounds import Cuts, smallest_conceivable, surely_infeasible
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.bounds.repeated_blocks import shared
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.reorder import in_order, moved
from lowtide.plan.problem.schedule import Event, Outcome, evaluate
from lowtide.plan.recompute.annealing.kernel import COMPILED
from lowtide.plan.recompute.annealing.rounds import (
    SHORTEST,
    OrderedProblem,
    anneal,
    anneal_first,
    anneal_from,
    moves_of,
)
from lowtide.plan.recompute.found import LOWEST, Found
from lowtide.plan.recompute.greedy import greedy
from lowtide.plan.recompute.optimal import cheapest, smallest_exactly
from lowtide.plan.recompute.refusal import refusal
from lowtide.plan.recompute.smallest_budget import Smallest, lowest_in_order, smallest_budget
from lowtide.plan.recompute.state import SLACK, State
from lowtide.plan.request import Limits

__all__ = ["REUSED_A_SECOND", "recompute", "recompute_or_none"]

_SMALL = 64
"""Up to so many storages the shortest path is looked for as well."""
REUSED_A_SECOND = 600
"""Repeated blocks are used where there is a second of the time limit for so many operators."""
_FAR = 2
"""Where choosing freely takes more than so many times the budget, borders do not mend that."""
_NEARLY = 1.2
"""A schedule of at most so much of the budget is worth mending."""
_COLD = 0.05
"""The heat, in times of a usual operator, at which a good schedule is mended and not forgotten."""
_OVERTIME = 60_000_000
"""Moves times operators that annealing may take even where time is up: about half a second on one core."""
_TINY = 40
"""Up to so many operators the shortest path comes even before the cut programs."""
_STATES = 30_000
"""Of which so many states may be visited."""


def recompute(
    problem: Problem,
    budget: int,
    relaxation: Relaxation,
    limits: Limits,
    *,
    starts: Iterable[Iterable[Event]] = (),
    others: Sequence[Sequence[int]] = (),
) -> Found:
    """The cheapest schedule of recomputation found inside ``budget`` bytes; its bound is the relaxation's.

    ``others`` are other orders of the problem's operators, to be tried where time is left.
    """
    run = _Search(problem, budget, limits, relaxation).searched(starts, others)
    if run.best is None and not run.impossible and budget >= run.floor:
        run.at_the_limit()
    return run.found()


def recompute_or_none(
    problem: Problem,
    budget: int,
    *,
    effort: float,
    left: float = inf,
    seed: int = 0,
    starts: Iterable[Iterable[Event]] = (),
    after_all: bool = False,
) -> Found | None:
    """The same in the problem's order, without looking for what would work where nothing is found.

    As much is tried as in ``effort`` seconds on a usual core, whatever this one is like, if so many are left;
    greedy even where they are over and nothing is found, if it is to be tried ``after_all``. The bound holds
    for that order alone.
    """
    limits = Limits(min(effort, max(left, 0.2)), seed)
    run = _Search(problem, budget, limits, None, effort=effort).searched(starts)
    if after_all and run.best is None and not run.impossible and budget >= run.floor:
        run.after_all()
    return None if run.best is None else run.found()


class _Search(State):
    """The portfolio, in one order of the operators first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.line = OrderedProblem.of(self.problem)
        self.in_order = lowest_in_order(self.problem)
        self.floor = smallest_conceivable(self.relaxation) if self.relaxation else self.in_order
        self.small = len(self.problem.bytes) <= _SMALL
        self.lowest: Smallest | None = None
        """The lowest peak, where it was looked for."""
        self.walked = False
        """Whether greedy was tried."""
        self.chosen: tuple[Sequence[int], frozenset[Event]] | None = None
        """An order that a cut program chose, with its schedule, where that needs less there."""

    def searched(self, starts: Iterable[Iterable[Event]], others: Sequence[Sequence[int]] = ()) -> _Search:
        """This, after the search; ``others`` are orders to be tried where time is left."""
        if self.plain.peak <= self.budget:
            self.offer(self.plain, "plain")
        elif self.budget >= self.floor:
            try:
                self.work(starts, others)
            except KeyboardInterrupt:
                self.interrupted = True
                if self.best is None:
                    raise
        return self

    def after_all(self) -> None:
        """Where nothing was found in time: greedy, annealed for a little while."""
        if not self.walked and self.budget >= self.in_order:
            start = self.walk()
            if start.peak <= self.budget:
                self.annealed(start)

    def annealed(self, start: Outcome, number: int = 0) -> Outcome:
        """Anneal a schedule in short rounds, even where time is up: where that ended.

        For very large problems, and without the compiled kernel, a round is not short: it ends in time.
        """
        self.overtime = COMPILED and SHORTEST * len(self.problem.ops) <= _OVERTIME
        seed = self.seed * 1000 + 50 + number
        events = anneal_from(self, self.line, start.events, moves=SHORTEST, seed=seed, hot=2.0)
        self.overtime = False
        return evaluate(self.problem, events)

    def walk(self) -> Outcome:
        """Greedy."""
        self.walked = True
        outcome = evaluate(self.problem, greedy(self.problem, self.budget))
        self.offer(outcome, "greedy")
        return outcome

    def at_the_limit(self) -> None:
        """Where nothing was found: greedy, else the schedule with the lowest peak, if that is low enough."""
        self.after_all()
        if self.best is not None:
            return
        seconds = (
            max(time_shares.RESERVE * self.time_limit, self.left()) - time_shares.PROOF * self.time_limit
        )
        known = self.lowest = self.smallest(seconds)
        if known.budget <= self.budget:
            self.offer(evaluate(known.problem, known.events), LOWEST, known.problem)

    def smallest(self, seconds: float) -> Smallest:
        """The lowest peak that can be found in so many seconds; the same whatever budget was asked for."""
        known = smallest_budget(
            self.problem, time_limit=seconds, seed=self.seed, effort=self.time_limit, enough=self.budget
        )
        if self.relaxation is None or not self.small or known.budget <= self.budget:
            return known
        deadline = time.monotonic() + seconds
        return smallest_exactly(known, self.relaxation, self.floor, states=_STATES // 3, deadline=deadline)

    def work(self, starts: Iterable[Iterable[Event]], others: Sequence[Sequence[int]]) -> None:
        """The portfolio."""
        pool = [evaluate(self.problem, start) for start in starts]
        for outcome in pool:
            self.offer(outcome, "given")
        quick = len(self.problem.ops) > REUSED_A_SECOND * (self.effort or self.time_limit)
        if self.large and quick and self.budget >= self.in_order:
            pool = [self.annealed(outcome, k) for k, outcome in enumerate(pool)]
        if (self.relaxation is None or not self.large) and self.budget >= self.in_order and not self.done():
            anneal_first(self, self.line, longest=not self.large)
        small = self.small
        tiny = small and len(self.problem.ops) <= _TINY
        if tiny and not self.done():
            self.exactly(_STATES // 3 if self.best is not None else _STATES * 2)
        cuts = Cuts(self.problem, self.budget, self.plain.peak_at, self.relaxation)
        ties = shared(self.problem, self.plain) if self.large and not quick and not self.done() else []
        freely = self.reuse(ties[0], time_shares.BLOCKS) if ties else None
        share = time_shares.CUT_PROGRAMS_LARGE if self.large else time_shares.CUT_PROGRAMS
        share -= time_shares.BLOCKS if ties else 0
        pool += self.solve_cuts(cuts, rounds=12, share=share)
        if not self.done():
            pool.append(self.walk())
        self.mend(freely, ties)
        if small and not tiny and not self.done():
            self.exactly(_STATES // 3)
        self.anneal(pool, others)
        if self.late and self.best is not None and self.method == "greedy":  # time was up before
            self.annealed(self.best)
        if small and not self.done():
            self.exactly(_STATES * 2)
        if not self.done() and self.best is not None and self.there is None:
            cuts.tighten(self.best.events, most=2)
            self.solve_cuts(cuts, rounds=3, share=time_shares.CUT_PROGRAMS_AGAIN)

    def anneal(self, pool: list[Outcome], others: Sequence[Sequence[int]]) -> None:
        """Anneal in the order that needs least, then in the others where time is left."""
        known = [outcome.events for outcome in pool]
        if self.chosen is not None:
            order, events = self.chosen
            self.anneal_in(order, [events, *known], first=300)
        if self.budget >= self.in_order and not self.done():
            anneal(self, self.line, known)
        for k, order in enumerate(others):
            self.anneal_in(order, known[-1:], first=600 + 300 * k)

    def anneal_in(self, order: Sequence[int], starts: Iterable[frozenset[Event]], *, first: int) -> None:
        """Anneal with the operators in another order; the starts are schedules in the problem's."""
        if not self.done():
            there = in_order(self.problem, order)
            begin = [moved(order, start) for start in starts]
            anneal(self, OrderedProblem.of(there), [*begin, greedy(there, self.budget)], first=first)

    def exactly(self, states: int) -> None:
        """The shortest path, where there are few enough states."""
        known = None if self.best is None else self.best.cost
        deadline = (
            self.until(time_shares.SHORTEST_PATH) if self.best is None else time.monotonic() + self.left()
        )
        found = cheapest(
            self.problem, self.budget, self.relaxation, known=known, states=states, deadline=deadline
        )
        self.bound = max(self.bound, found.bound)
        if found.schedule is not None:
            there, events = found.schedule
            self.offer(evaluate(there, events), "exact", there)
        self.impossible = self.impossible or (found.impossible and self.best is None)

    def reuse(self, ties: Ties, share: float) -> Outcome | None:
        """A schedule with one choice for the copies of repeated blocks, in a share of the time limit."""
        seconds = max(0.0, min(self.left(), share * self.time_limit))
        cut, slack = self.plain.peak_at, 5 * SLACK
        asked = CutProblem(self.problem, self.budget, [cut])
        result = solve_cuts(asked, Effort(100, seconds, slack), ties=ties)
        if result.events is None:
            return None
        outcome = evaluate(self.problem, result.events)
        self.offer(outcome, "blocks")
        return outcome

    def mend(self, freely: Outcome | None, ties: list[Ties]) -> None:
        """Anneal schedules of repeated blocks that nearly fit, cold; then with closer and closer borders."""
        if freely is not None and freely.peak > _FAR * self.budget:
            return
        end = time.monotonic() + time_shares.BLOCKS_REPAIR * self.time_limit
        for k, one in enumerate(ties):
            if self.done() or time.monotonic() > end or self.left() < time_shares.ANNEALING * self.time_limit:
                break
            outcome = freely if freely is not None and not k else self.reuse(one, time_shares.BLOCKS)
            if outcome is None:  # closer borders leave less
                break
            if outcome.peak <= _NEARLY * self.budget:
                seed = self.seed * 1000 + 200 + k
                start, moves = outcome.events, moves_of(self)
                anneal_from(self, self.line, start, moves=moves, seed=seed, hot=_COLD, method="blocks")

    def solve_cuts(self, cuts: Cuts, *, rounds: int, share: float) -> list[Outcome]:
        """Solve the cut program, add the cuts its solution violates, and again."""
        end = time.monotonic() + share * self.time_limit
        found: list[Outcome] = []
        for _ in range(rounds):
            left = min(self.left(), end - time.monotonic())
            if self.done() or left <= 0:
                break
            effort = Effort(2_000, left, SLACK / 2) if self.large else Effort(20_000, left)
            known = self.best is not None and self.there is None
            result = cuts.solve(effort, start=self.best.events if known and self.best else None)
            left = min(self.left(), (end - time.monotonic()) / 2)
            if left > 0 and (self.best is None or self.best.cost > cuts.bound):
                cuts.split(replace(effort, seconds=left), result)
            if not cuts.feasible:
                self.impossible = True
                break
            self.bound = max(self.bound, cuts.bound)
            self.report()
            if result.events is None:
                break
            there, outcome = self.tried(result)
            found.append(evaluate(self.problem, result.events))
            if result.order is not None and outcome.peak > self.budget and not self.done():
                found += self.in_turn(cuts, min(self.left(), end - time.monotonic()))
            if outcome.peak <= self.budget or not cuts.tighten(outcome.events, there=there):
                break
        return found[-2:]

    def in_turn(self, cuts: Cuts, seconds: float) -> list[Outcome]:
        """The schedule of the cut program with the operators in the problem's order."""
        nodes, slack = (500, SLACK) if self.large else (5_000, 0.0)
        asked = CutProblem(self.problem, self.budget, cuts.cuts, cuts.heavy)
        result = solve_cuts(asked, Effort(nodes, max(0.1, seconds), slack))
        if result.events is None:
            return []
        outcome = evaluate(self.problem, result.events)
        self.offer(outcome, "cut")
        return [outcome]

    def tried(self, result: CutResult) -> tuple[Problem, Outcome]:
        """The schedule of a cut program in the order that it chose."""
        outcome = evaluate(self.problem, result.events or ())
        self.offer(outcome, "cut")
        self.chosen = None
        if result.order is None:
            return self.problem, outcome
        there = in_order(self.problem, result.order)
        other = evaluate(there, moved(result.order, result.events or ()))
        self.offer(other, "cut", there)
        if other.peak < outcome.peak:
            self.chosen = result.order, result.events or frozenset()
        return there, other

    def found(self) -> Found:
        """The result, or the error that says what would work."""
        if self.best is None:
            raise self.infeasible()
        there = self.there or self.problem
        return Found(
            there,
            self.budget,
            self.best.events,
            self.best.cost,
            min(self.bound, self.best.cost),
            self.best.peak,
            Smallest(self.best.peak, self.best.events, there),
            self.floor,
            self.method,
            time.monotonic() - self.began,
            self.interrupted,
            self.late,
        )

    def infeasible(self) -> InfeasibleError:
        """What to say where no plan was found."""
        proven = self.impossible or self.budget < self.floor
        if self.relaxation is not None and not proven:
            seconds = min(1.0, time_shares.PROOF * self.time_limit)
            proven = surely_infeasible(self.problem, self.relaxation, self.budget, seconds=seconds)
        known = self.lowest or self.smallest(time_shares.LOWEST * self.time_limit)
        return refusal(self.budget, known, floor=self.floor, proven=proven)
