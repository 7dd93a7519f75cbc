"""recompute(problem, budget): the cheapest schedule that could be found inside a budget, with its proof.

A portfolio, in this order, each step skipped once the cost equals the bound:

1. store everything, if that fits;
2. for all but large problems a short annealing, so that there is something to compare with; for tiny ones
   the shortest path of step 7;
3. for large problems with repeated blocks a cut program with one choice for all copies;
4. cut programs, growing by the cuts at which their own solution exceeds the budget: they give the bound,
   often the optimum itself, else good starts;
5. greedy by next use: nearly always feasible; then step 3 again in other ways, mended by a cold annealing;
6. annealing from the best starts, then again from the best plan;
7. for small problems the shortest path over what is held: exact, and with several runs before an instant;
8. cut programs again, with cuts where the best plan touches the budget.

Work is counted in moves and nodes, not in seconds, so that the same seed gives the same plan; the time
limit is a deadline that cuts the work short on a slow machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from lowtide.errors import InfeasibleError
from lowtide.plan.anneal import Annealer
from lowtide.plan.blocks import shared
from lowtide.plan.bounds import Cuts, smallest_conceivable, surely_infeasible
from lowtide.plan.cut import Ties, solve_cuts
from lowtide.plan.exact import exact
from lowtide.plan.found import Found
from lowtide.plan.greedy import greedy
from lowtide.plan.pauses import as_events
from lowtide.plan.problem import Problem, median_time
from lowtide.plan.schedule import Event, Outcome, evaluate
from lowtide.plan.smallest import Smallest, smallest_budget
from lowtide.units import format_bytes

__all__ = ["REUSED_A_SECOND", "Progress", "recompute", "recompute_or_none", "refusal"]

Progress = Callable[[float, float | None, float, float | None], None]
"""Called with seconds so far, best overhead (or None), bound, and gap; overheads in seconds of the step."""

_WORK = 240_000_000
"""Moves times operators that annealing may take in ten seconds: about five of them on one core."""
_LARGE = 300
"""From so many operators on, a cut program may leave a little open."""
_SMALL = 64
"""Up to so many storages the shortest path is looked for as well."""
_ENDING = 0.96
"""Of the time limit, after which nothing new is begun: what has begun may take a little longer."""
_RESERVE = 0.3
"""Of the time limit, for the lowest peak and a proof that there is no plan, where nothing is found before."""
_EXACTLY = 0.75
"""Of the time limit, after which the shortest path is given up where nothing is found before."""
_PROOF = 0.1
"""Of the time limit, for that proof."""
REUSED_A_SECOND = 600
"""Repeated blocks are used where there is a second of the time limit for so many operators."""
_FREELY = 0.15
"""Of the time limit, at most for one cut program of repeated blocks."""
_MENDING = 0.25
"""Of the time limit, for mending their schedules."""
_ANNEALING = 0.3
"""Of the time limit, left for the annealing that comes after."""
_FAR = 2
"""Where choosing freely takes more than so many times the budget, borders do not mend that."""
_NEARLY = 1.2
"""A schedule of at most so much of the budget is worth mending."""
_COLD = 0.05
"""The heat, in times of a usual operator, at which a good schedule is mended and not forgotten."""
_TINY = 40
"""Up to so many operators even before the cut programs."""
_STATES = 30_000
"""Of which so many states may be visited."""
_SLACK = 1e-4
"""That little, as a share of the time of the plain step."""
_ROUNDING = 1e-7
"""A cost above the bound by no more than this share equals it: the solver works in floating point."""


def recompute(
    problem: Problem,
    budget: int,
    *,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
    starts: Iterable[Iterable[Event]] = (),
) -> Found:
    """The cheapest schedule of recomputation found inside ``budget`` bytes."""
    run = _Search(problem, budget, time_limit, seed, progress).searched(starts)
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
) -> Found | None:
    """The same, without looking for what would work where nothing is found.

    As much is tried as in ``effort`` seconds on a usual core, whatever this one is like, if so many are left.
    """
    run = _Search(problem, budget, min(effort, max(left, 0.2)), seed, None, effort=effort).searched(starts)
    return None if run.best is None else run.found()


@dataclass
class _Search:
    problem: Problem
    budget: int
    time_limit: float
    seed: int
    progress: Progress | None
    lowest: Smallest | None = None
    """The lowest peak, where it was looked for."""
    effort: float = 0.0
    """Seconds that the number of moves is for; the time limit if 0."""
    began: float = field(default_factory=time.monotonic)
    best: Outcome | None = None
    method: str = ""
    bound: int = 0
    interrupted: bool = False
    late: bool = False

    def __post_init__(self) -> None:
        self.plain = evaluate(self.problem, ())
        self.floor = smallest_conceivable(self.problem)
        self.annealer = Annealer(self.problem)
        self.median = median_time(self.problem)
        self.impossible = False
        self.paused: Problem | None = None
        """The problem of the best schedule, where that needs pauses."""

    def searched(self, starts: Iterable[Iterable[Event]]) -> _Search:
        """This, after the search."""
        if self.plain.peak <= self.budget:
            self.offer(self.plain, "plain")
        elif self.budget >= self.floor:
            try:
                self.work(starts)
            except KeyboardInterrupt:
                self.interrupted = True
                if self.best is None:
                    raise
        return self

    def at_the_limit(self) -> None:
        """Where nothing was found: the schedule with the lowest peak, if that is low enough."""
        seconds = max(_RESERVE * self.time_limit, self.left()) - _PROOF * self.time_limit
        known = self.lowest = smallest_budget(self.problem, time_limit=seconds, seed=self.seed)
        if known.budget <= self.budget:
            self.offer(evaluate(self.problem, known.events), "lowest peak")

    def offer(self, outcome: Outcome, method: str, paused: Problem | None = None) -> None:
        """Take a schedule as the best if it is; ``paused`` is its problem, where that needs pauses."""
        if outcome.peak <= self.budget and (self.best is None or outcome.cost < self.best.cost):
            self.best, self.method, self.paused = outcome, method, paused
            self.report()  # may end in an interrupt: the best is whole by now

    def report(self) -> None:
        """Tell whoever watches."""
        if self.progress is None:
            return
        best = None if self.best is None else self.problem.seconds(self.best.cost)
        bound = self.problem.seconds(self.bound)
        total = self.problem.seconds(self.problem.total_time)
        gap = None if best is None or not total else max(0.0, best - bound) / (total + best)
        self.progress(time.monotonic() - self.began, best, bound, gap)

    def left(self) -> float:
        """Seconds to the deadline."""
        return _ENDING * self.time_limit - (time.monotonic() - self.began)

    def done(self) -> bool:
        """Nothing can or may be gained any more."""
        large = len(self.problem.ops) >= _LARGE
        slack = int((_SLACK if large else _ROUNDING) * self.problem.total_time)
        if self.impossible or (self.best is not None and self.best.cost - self.bound <= slack):
            return True
        reserve = _RESERVE * self.time_limit if self.best is None else 0.0
        self.late = self.late or self.left() <= reserve
        return self.late

    def work(self, starts: Iterable[Iterable[Event]]) -> None:
        """The portfolio."""
        pool = [evaluate(self.problem, start) for start in starts]
        for outcome in pool:
            self.offer(outcome, "given")
        large = len(self.problem.ops) >= _LARGE
        if not large and not self.done():
            short = 1.0 if self.effort else min(1.0, self.time_limit)
            self.round(frozenset(), max(10_000, int(100_000 * short)), seed=self.seed, hot=2.0)
        small = len(self.problem.bytes) <= _SMALL
        tiny = small and len(self.problem.ops) <= _TINY
        if tiny and not self.done():
            self.exactly(_STATES // 3 if self.best is not None else _STATES * 2)
        cuts = Cuts(self.problem, self.budget, self.plain)
        quick = len(self.problem.ops) > REUSED_A_SECOND * self.time_limit
        ties = shared(self.problem, self.plain) if large and not quick and not self.done() else []
        freely = self.reuse(ties[0], _FREELY) if ties else None
        pool += self.solve_cuts(cuts, rounds=12, share=(0.4 if large else 0.6) - (_FREELY if ties else 0))
        if not self.done():
            pool.append(evaluate(self.problem, greedy(self.problem, self.budget)))
            self.offer(pool[-1], "greedy")
        self.mend(freely, ties)
        if small and not tiny and not self.done():
            self.exactly(_STATES // 3)
        if not self.done():
            self.anneal(pool)
        if small and not self.done():
            self.exactly(_STATES * 2)
        if not self.done() and self.best is not None and self.paused is None:
            cuts.tighten(self.best.events, most=2)
            self.solve_cuts(cuts, rounds=3, share=0.25)

    def exactly(self, states: int) -> None:
        """The shortest path, where there are few enough states."""
        known = None if self.best is None else self.best.cost
        share = _ENDING if self.best is not None else _EXACTLY
        deadline = self.began + share * self.time_limit
        result = exact(self.problem, self.budget, known=known, states=states, deadline=deadline)
        self.bound = max(self.bound, result.bound)
        if result.runs is not None:
            paused, events = as_events(self.problem, result.runs)
            self.offer(evaluate(paused, events), "exact", paused)
        elif result.finished and known is None:
            self.impossible = True

    def reuse(self, ties: Ties, share: float) -> Outcome | None:
        """A schedule with one choice for the copies of repeated blocks, in a share of the time limit."""
        seconds = max(0.0, min(self.left(), share * self.time_limit))
        cut, slack = self.plain.peak_at, 5 * _SLACK
        result = solve_cuts(
            self.problem, self.budget, [cut], nodes=100, seconds=seconds, slack=slack, ties=ties
        )
        if result.events is None:
            return None
        outcome = evaluate(self.problem, result.events)
        self.offer(outcome, "blocks")
        return outcome

    def mend(self, freely: Outcome | None, ties: list[Ties]) -> None:
        """Anneal schedules of repeated blocks that nearly fit, cold; then with closer and closer borders."""
        if freely is not None and freely.peak > _FAR * self.budget:
            return
        end = time.monotonic() + _MENDING * self.time_limit
        for k, one in enumerate(ties):
            if self.done() or time.monotonic() > end or self.left() < _ANNEALING * self.time_limit:
                break
            outcome = freely if freely is not None and not k else self.reuse(one, _FREELY)
            if outcome is None:  # closer borders leave less
                break
            if outcome.peak <= _NEARLY * self.budget:
                seed = self.seed * 1000 + 200 + k
                self.round(outcome.events, self.moves(), seed=seed, hot=_COLD, method="blocks")

    def solve_cuts(self, cuts: Cuts, *, rounds: int, share: float) -> list[Outcome]:
        """Solve the cut program, add the cuts its solution violates, and again."""
        end = time.monotonic() + share * self.time_limit
        large = len(self.problem.ops) >= _LARGE
        found: list[Outcome] = []
        for _ in range(rounds):
            left = min(self.left(), end - time.monotonic())
            if self.done() or left <= 0:
                break
            result = cuts.solve(
                nodes=2_000 if large else 20_000,
                seconds=left,
                slack=_SLACK if large else 0.0,
                start=None if self.best is None else self.best.events,
            )
            if not result.feasible:
                self.impossible = True
                break
            self.bound = max(self.bound, cuts.bound)
            self.report()
            if result.events is None:
                break
            outcome = evaluate(self.problem, result.events)
            found.append(outcome)
            self.offer(outcome, "cut")
            if outcome.peak <= self.budget or not cuts.tighten(outcome.events):
                break
        return found[-2:]

    def anneal(self, pool: list[Outcome]) -> None:
        """Anneal from each start, then again and again from the best."""
        moves = self.moves()
        starts = {outcome.events: None for outcome in [*pool, self.plain]}
        ends: list[tuple[int, int, frozenset[Event]]] = []
        for k, start in enumerate(starts):
            if not self.done():
                ends.append(self.round(start, moves, seed=self.seed * 1000 + k, hot=2.0))
        for k in range(4 + 4 * (self.best is None)):
            if self.done():
                break
            start = self.best.events if self.best is not None else min(ends)[2]
            hot = 1.0 if k % 2 else 4.0
            ends.append(self.round(start, moves, seed=self.seed * 1000 + 100 + k, hot=hot))

    def moves(self) -> int:
        """How many moves a round of annealing has."""
        work = int(_WORK * min(1.0, (self.effort or self.time_limit) / 10))
        return max(20_000, work // max(len(self.problem.ops), 60) // 8)

    def round(
        self, start: frozenset[Event], moves: int, *, seed: int, hot: float, method: str = "annealing"
    ) -> tuple[int, int, frozenset[Event]]:
        """One round of annealing, in pieces short enough for a deadline and an interrupt."""
        weight = max(16, self.median * 64)
        pieces = max(1, moves * len(self.problem.ops) // 12_000_000)
        cold = hot / 32
        ratio = (cold / hot) ** (1 / pieces)
        shift = max(0, sum(max(0, x - self.budget) for x in self.plain.live).bit_length() - 22)
        events = start
        excess = cost = 0
        for piece in range(pieces):
            if self.done():
                break
            high = hot * self.median * ratio**piece
            result = self.annealer.round(
                events,
                self.budget,
                moves=moves // pieces,
                seed=seed * 64 + piece,
                hot=high,
                cold=high * ratio,
                weight=weight,
                shift=shift,
                known=None if self.best is None else self.best.cost,
            )
            events, weight, excess, cost = result.last, result.weight, result.excess, result.last_cost
            if result.best is not None:
                self.offer(evaluate(self.problem, result.best), method)
        return excess, cost, events

    def found(self) -> Found:
        """The result, or the error that says what would work."""
        if self.best is None:
            raise self.infeasible()
        solved = self.best.cost - self.bound <= int(_ROUNDING * self.problem.total_time)
        return Found(
            self.paused or self.problem,
            self.budget,
            self.best.events,
            self.best.cost,
            min(self.bound, self.best.cost) if not solved else self.best.cost,
            self.best.peak,
            Smallest(self.floor, self.best.peak, self.best.events),
            self.method,
            time.monotonic() - self.began,
            self.interrupted,
            self.late,
        )

    def infeasible(self) -> InfeasibleError:
        """What to say where no plan was found."""
        proven = self.impossible or self.budget < self.floor
        proven = proven or surely_infeasible(
            self.problem, self.budget, seconds=min(1.0, _PROOF * self.time_limit)
        )
        known = self.lowest or smallest_budget(
            self.problem, time_limit=min(2.0, self.time_limit), seed=self.seed
        )
        return refusal(self.problem, self.budget, known, proven=proven)


def refusal(problem: Problem, budget: int, known: Smallest, *, proven: bool) -> InfeasibleError:
    """What to say where no plan was found: the smallest budget for which there is one."""
    text = "no plan fits" if proven else "no plan was found for"
    error = InfeasibleError(
        f"{text} {format_bytes(budget)}; the smallest budget with a known plan is "
        f"{format_bytes(known.budget)} ({known.budget} bytes)",
        budget=budget,
        smallest_budget=known.budget,
        floor=smallest_conceivable(problem),
        proven=proven,
    )
    error.events = known.events
    return error
