"""with_offload(problem, budget, link): the fastest plan found that may keep storages on the host as well.

A cut program chooses what goes to the host and what runs again, as far as the link reaches; it grows by the
instants at which its own solution exceeds the budget, and gives the bound. What it sends is given times to
leave and to come back, what is left is recomputation again, and a simulation with the link's lanes has the
last word. Then the same for a slower link or a smaller budget, and for the storages that are made first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from lowtide.plan import time_shares
from lowtide.plan.bounds.cut import CutProblem, CutResult, Effort, Ties, solve_cuts
from lowtide.plan.bounds.first_heavy import by_cases
from lowtide.plan.bounds.lower_bounds import chained
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.bounds.repeated_blocks import shared
from lowtide.plan.offload.trips import Trip, by_instant, carried, hurried, prefix, relaxed, trips, with_trips
from lowtide.plan.offload.waiting import overhead, waits_of
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event, evaluate
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.recompute.found import Found
from lowtide.plan.recompute.portfolio import REUSED_A_SECOND, recompute_or_none
from lowtide.plan.recompute.state import LARGE
from lowtide.plan.request import Limits

__all__ = ["with_offload"]

_CAREFUL = 0.9
"""The share of the link's rates that plans are chosen by; the bound, and what is told, are for all of it."""
_LARGE = 1000
"""From so many operators on, recomputation alone gets half of the time, unless blocks repeat."""
_REPEATING = 300
"""From so many operators on, repeated blocks are looked for."""
_SHORT = 2.5
"""Seconds in which what repeats is chosen, however short the time limit: plans are worth more than bounds."""
_CHOICE = 0.5
"""Seconds for one such choice at least: most are solved in less, and plans are as good as the choice is."""
_SLACK = 5e-4
"""What such a choice may leave open, as a share of the time of the plain step."""
_WAITING = 0.03
"""Waiting before one instant, for what runs again, that is worth another choice; a share of the step."""
_ROUNDS = 6
"""So often the cut program may grow."""
_TRIES = (
    *((0.9, 0.99), (1.0, 1.0), (0.85, 1.0), (0.9, 0.97)),
    *((0.8, 0.98), (0.7, 1.0), (0.9, 0.93), (0.6, 0.95)),
)
"""Shares of the link and of the budget that the host's part is chosen for, besides the careful ones."""
_PRUNED = 4
"""So often storages that are waited for may stay on the device after all."""
_ALONE = (1.0, 1.04, 1.1, 1.2)
"""Without recomputation: shares of what is too much that go to the host, first made first."""


class _Away:
    """The search, and what it knows so far."""

    def __init__(
        self,
        problem: Problem,
        budget: int,
        link: Link,
        relaxation: Relaxation,
        limits: Limits,
    ) -> None:
        self.problem, self.budget, self.link = problem, budget, link
        self.relaxation = relaxation
        self.careful = slowed(link, _CAREFUL)
        time_limit = limits.time_limit
        self.time_limit, self.seed, self.progress = time_limit, limits.seed, limits.progress
        self.began = time.monotonic()
        self.plain = evaluate(problem, ())
        self.large = len(problem.ops) >= LARGE
        self.recomputing = any(problem.again)
        most = REUSED_A_SECOND * max(time_limit, _SHORT)
        worth = self.recomputing and _REPEATING <= len(problem.ops) <= most
        self.ways = shared(problem, self.plain) if worth else []
        """Ways to choose once for the copies of repeated blocks."""
        self.best: Found | None = None
        self.bound = 0
        self.impossible = False
        self.interrupted = False
        self.cuts = {self.plain.peak_at}
        self.others = 0.0
        """Seconds that are left to others, by what runs now."""

    def left(self) -> float:
        """Seconds to the deadline."""
        return time_shares.OFFLOAD_ENDING * self.time_limit - (time.monotonic() - self.began)

    def done(self) -> bool:
        """Nothing can or may be gained any more."""
        optimal = self.best is not None and self.best.cost <= self.bound
        reserve = time_shares.OFFLOAD_RESERVE * self.time_limit if self.best is None else 0.0
        return optimal or self.impossible or self.left() <= max(reserve, self.others)

    def offer(self, found: Found | None) -> None:
        """Take a plan as the best if it is."""
        if found is not None and (self.best is None or found.cost < self.best.cost):
            self.best = found
            self.report()

    def report(self) -> None:
        """Tell whoever watches."""
        if self.progress is not None and self.best is not None:
            bound = min(self.bound, self.best.cost)
            gap = (self.best.cost - bound) / max(1, self.problem.total_time + self.best.cost)
            spent = time.monotonic() - self.began
            self.progress(spent, self.best.overhead_seconds, self.problem.seconds(bound), gap)

    def work(self) -> None:
        """The search itself; what repeats is chosen first, as that soon gives good plans."""
        self.reuse()
        able = self.recomputing or self.plain.peak <= self.budget
        if able and (self.best is None or not self.done()):
            self.alone()
        if self.large and not self.done():
            self.prove()
        self.grow()
        for away, events in self.candidates():
            if self.done():
                break
            self.attempt(away, events)

    def alone(self) -> None:
        """Recomputation alone, for a plan to compare with, unless a linear program says it is no better."""
        if self.best is not None:
            asked = CutProblem(self.problem, self.budget, self.cuts)
            seconds = max(0.2, min(self.left(), self.time_limit * time_shares.OFFLOAD_CUTS))
            least = solve_cuts(asked, Effort(0, seconds))
            if not least.feasible or least.bound >= self.best.cost:
                return
        large = len(self.problem.ops) >= _LARGE and not self.ways
        share = time_shares.OFFLOAD_ALONE_LARGE if large else time_shares.OFFLOAD_ALONE
        effort = min(self.time_limit * share, max(0.2, self.left()))
        found = recompute_or_none(
            self.problem, self.budget, effort=effort, seed=self.seed, after_all=self.best is None
        )
        self.offer(found)
        if found is not None and found.interrupted:
            raise KeyboardInterrupt

    def prove(self) -> None:
        """The bound of a large step, by linear programs: whole cut programs prove little more, and take long.

        By cases, where another operator than that of the peak may be first.
        """
        seconds = max(0.2, min(self.left(), self.time_limit * time_shares.OFFLOAD_CUTS_FIRST))
        asked = CutProblem(self.problem, self.budget, self.cuts, link=self.link, relaxation=self.relaxation)
        known = solve_cuts(asked, Effort(0, seconds))
        result = by_cases(asked, Effort(0, seconds), known)
        self.bound = max(self.bound, result.bound)
        self.impossible = self.best is None and not result.feasible
        self.report()

    def grow(self) -> None:
        """Solve the cut program, add a cut where its solution exceeds the budget, and again; then try it.

        Some rounds give the bound, the others plans, for copies that are a little late. Large steps have a
        bound already: plans come first.
        """
        for link in (self.careful, self.link) if self.large else (self.link, self.careful):
            cuts = {self.plain.peak_at} if self.large else self.cuts
            until = self.left() - self.time_limit * time_shares.OFFLOAD_BOUND
            for _ in range(_ROUNDS):
                if self.done() or (link is self.link and self.left() < until):
                    break
                share = time_shares.OFFLOAD_CUTS if self.bound else time_shares.OFFLOAD_CUTS_FIRST
                seconds = max(0.2, min(self.left(), self.time_limit * share))
                proof = self.relaxation if link is self.link else None
                asked = CutProblem(self.problem, self.budget, cuts, link=link, relaxation=proof)
                effort = Effort(500, seconds)
                result = solve_cuts(asked, effort) if proof else self.in_time(asked, effort)
                if not result.feasible:
                    self.impossible = self.best is None and link is self.link
                    break
                if link is self.link:
                    self.bound = max(self.bound, result.bound)
                    self.report()
                if result.events is None or (len(cuts) > 1 and not result.solved and link is self.link):
                    break
                self.cuts = cuts
                plan = self.attempt if link is self.careful else self.most
                worst = plan(result.away, result.events)
                if worst < 0 or any(abs(worst - cut) <= 1 for cut in cuts):
                    break
                if not chained(self.relaxation, cuts, worst):
                    break
                cuts = cuts | {worst}

    def reuse(self) -> None:
        """Choose once for the copies of repeated blocks of a large step: that is soon solved.

        The first choice is tried however short the time limit is.
        """
        until = self.left() - self.time_limit * time_shares.OFFLOAD_BLOCKS
        self.others = self.left() - max(_SHORT, self.time_limit * time_shares.OFFLOAD_BLOCKS_MOST)
        for k, ties in enumerate(self.ways[1:] + self.ways[:1]):
            if k and (self.done() or self.left() < until):
                break
            seconds = max(_CHOICE, min(self.left(), self.time_limit * time_shares.OFFLOAD_CUTS))
            asked = CutProblem(self.problem, self.budget, [self.plain.peak_at], link=self.careful)
            result = self.in_time(asked, Effort(100, seconds, _SLACK), ties)
            if result.events is not None:
                self.attempt(result.away, result.events)
        self.others = 0.0

    def in_time(self, asked: CutProblem, effort: Effort, ties: Ties | None = None) -> CutResult:
        """The solution of a cut program for plans; where that waits much, of one whose copies come in time.

        Of large steps alone: the others have time to try what a slower link would choose.
        """
        result = solve_cuts(asked, effort, ties=ties)
        if not self.large or len(asked.cuts) > 1:
            return result
        instant, lost = self.waited(result)
        seconds = min(effort.seconds, self.left() - self.time_limit * time_shares.OFFLOAD_PLAN)
        if instant < 0 or self.done() or seconds < effort.seconds / 2:
            return result
        other = solve_cuts(replace(asked, early=(instant,)), replace(effort, seconds=seconds), ties=ties)
        return other if other.events is not None and self.waited(other)[1] < lost else result

    def waited(self, result: CutResult) -> tuple[int, int]:
        """The instant that is waited for most, or -1 if not for long; the time of running again with it."""
        wished = self.wished(result.away, result.events or (), self.careful)[0]
        if not wished:
            return -1, 0
        there = with_trips(self.problem, wished)
        events = carried(self.problem, there, result.events or ())
        waits = waits_of(there, events, self.careful)
        late: dict[int, float] = {}
        for trip in wished:
            if trip.late not in self.problem.readers[trip.storage]:  # what runs again reads it
                late[trip.late] = late.get(trip.late, 0.0) + waits.get(trip.storage, 0.0)
        most = max(late, key=late.__getitem__, default=-1)
        much = most >= 0 and late[most] > _WAITING * self.problem.seconds(self.problem.total_time)
        return most if much else -1, overhead(there, events, self.careful)

    def candidates(self) -> Iterator[tuple[Mapping[int, int], Collection[Event]]]:
        """What goes to the host, and what runs again: by cut programs, then first made."""
        for share, part in _TRIES:
            if self.done():
                return
            slower = slowed(self.link, share)
            asked = CutProblem(self.problem, max(1, int(self.budget * part)), self.cuts, link=slower)
            seconds = max(0.1, min(self.left(), self.time_limit * time_shares.OFFLOAD_CHOICE))
            result = solve_cuts(asked, Effort(200, seconds))
            yield result.away, result.events or ()
        peak = max(self.cuts, key=self.plain.live.__getitem__)
        for share in () if self.recomputing else _ALONE:
            yield prefix(self.problem, peak, int((self.plain.peak - self.budget) * share)), ()

    def attempt(self, away: Mapping[int, int], events: Collection[Event]) -> int:
        """Plan with these storages on the host; the instant where the plan first asked for most, or -1."""
        wished, live, worst = self.wished(away, events, self.careful)
        if wished:
            self.complete(wished, away, events)
        if worst >= 0 and not self.done():
            self.complete(hurried(self.problem, wished, away, live, self.budget), away, events)
        return worst

    def most(self, away: Mapping[int, int], events: Collection[Event]) -> int:
        """The instant at which most is live above the budget, should copies be as fast as can be; or -1."""
        return self.wished(away, events, self.link)[2]

    def wished(
        self, away: Mapping[int, int], events: Collection[Event], link: Link
    ) -> tuple[list[Trip], list[int], int]:
        """Trips as the link allows them, what is live then, and the instant most above the budget, or -1."""
        wished = trips(self.problem, away, link, events=events)
        if not wished:
            return wished, [], -1
        problem = with_trips(self.problem, wished)
        live = by_instant(self.problem, problem, carried(self.problem, problem, events))
        worst = max(range(len(live)), key=live.__getitem__)
        return wished, live, worst if live[worst] > self.budget else -1

    def complete(self, taken: list[Trip], away: Mapping[int, int], events: Collection[Event]) -> None:
        """Plan beside the trips, then without those that are waited for longest, as long as that helps."""
        best = self.planned(taken, away, self.problem, events, time_shares.OFFLOAD_PLAN)
        for _ in range(_PRUNED):
            if best is None or self.done():
                return
            found, taken = best
            waits = waits_of(found.problem, found.events, self.careful)
            longest = max(waits.values(), default=0.0)
            staying = {s for s, wait in waits.items() if wait > longest / 2}
            if not staying:
                return
            fewer = [trip for trip in taken if trip.storage not in staying]
            best = self.planned(fewer, away, found.problem, found.events, time_shares.OFFLOAD_FEWER)
            if best is not None and best[0].cost >= found.cost:
                return

    def planned(
        self,
        taken: list[Trip],
        away: Mapping[int, int],
        source: Problem,
        events: Collection[Event],
        share: float,
    ) -> tuple[Found, list[Trip]] | None:
        """The best recomputation beside the trips, with a share of the time limit, and the trips relaxed.

        ``events`` are a schedule of ``source`` to start from.
        """
        problem = with_trips(self.problem, taken)
        found = recompute_or_none(
            problem,
            self.budget,
            effort=max(0.2, share * self.time_limit),
            left=self.left(),
            seed=self.seed,
            starts=[carried(source, problem, events)],
        )
        if found is None:
            return None
        best = self.priced(found), taken
        self.offer(best[0])
        if found.interrupted:  # it may be the best, and ends the whole search
            raise KeyboardInterrupt
        if found.problem is not problem:
            return None
        easier = self.relax(found, taken, away)
        if easier is not None and easier[0].cost < best[0].cost:
            self.offer(easier[0])
            return easier
        return best

    def relax(
        self, found: Found, taken: list[Trip], away: Mapping[int, int]
    ) -> tuple[Found, list[Trip]] | None:
        """Let storages leave later and come back earlier where the plan has room for it."""
        events = carried(found.problem, self.problem, found.events)
        spent = [0] * len(self.problem.ops)
        for instant, op in events:
            spent[instant] += self.problem.repeat[op]
        # an operator begins after what runs again before it
        whole = [own + again for own, again in zip(self.problem.time, spent, strict=True)]
        begins = [t + again for t, again in zip([0, *accumulate(whole)], [*spent, 0], strict=True)]
        wished = trips(self.problem, away, self.careful, begins, events)
        live = by_instant(self.problem, found.problem, found.events)
        taken = relaxed(self.problem, taken, wished, live, self.budget)
        problem = with_trips(self.problem, taken)
        outcome = evaluate(problem, carried(self.problem, problem, events))
        if outcome.peak > self.budget:
            return None
        easier = replace(found, problem=problem, events=outcome.events, cost=outcome.cost, peak=outcome.peak)
        return self.priced(easier), taken

    def priced(self, found: Found) -> Found:
        """The plan with its waiting as part of its cost, should copies be a little late.

        Times are never quite as measured: a plan whose copies end just in time would wait for them.
        """
        cost = overhead(found.problem, found.events, self.careful)
        return replace(found, cost=cost, bound=0, method=f"offload, {found.method}")


def with_offload(
    problem: Problem,
    budget: int,
    link: Link,
    relaxation: Relaxation,
    limits: Limits,
) -> tuple[Found | None, int, bool]:
    """The best plan found; the bound; where there is no plan, whether it is proven that none exists."""
    search = _Away(problem, budget, link, relaxation, limits)
    try:
        search.work()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        search.interrupted = True
    best = search.best
    if best is None:
        return None, search.bound, search.impossible
    cost = overhead(best.problem, best.events, link) if best.problem.fetched else best.cost
    spent = time.monotonic() - search.began
    bound = min(search.bound, cost)
    best = replace(best, cost=cost, bound=bound, solve_seconds=spent, interrupted=search.interrupted)
    best = replace(best, stopped_by_time=search.left() <= 0)
    return best, bound, False


def slowed(link: Link, share: float) -> Link:
    """A link with a share of the rates."""
    return replace(link, to_host=link.to_host * share, to_device=link.to_device * share)
