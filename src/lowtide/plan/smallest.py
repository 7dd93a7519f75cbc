"""The smallest budget: what no schedule can go below, and the smallest for which there is one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lowtide.plan.anneal import Annealer
from lowtide.plan.bounds import smallest_conceivable
from lowtide.plan.greedy import greedy
from lowtide.plan.problem import Problem, median_time
from lowtide.plan.schedule import Event, Outcome, evaluate

__all__ = ["Smallest", "smallest_budget"]


@dataclass(frozen=True, slots=True)
class Smallest:
    """How far memory can be lowered."""

    floor: int
    """No schedule needs less: the largest working set of one operator beside what stays anyway."""
    budget: int
    """The smallest budget for which a schedule is known."""
    events: frozenset[Event]
    """That schedule."""


def smallest_budget(problem: Problem, *, time_limit: float = 5.0, seed: int = 0) -> Smallest:
    """The schedule with the lowest peak that could be found, whatever it costs."""
    end = time.monotonic() + time_limit
    floor = smallest_conceivable(problem)
    annealer = Annealer(problem)
    best = evaluate(problem, ())
    for start in (_for_each_use(problem), greedy(problem, floor), greedy(problem, floor + floor // 10)):
        best = min(best, evaluate(problem, start), key=_peak)
    plain = evaluate(problem, ())
    moves = max(10_000, int(12_000_000 * min(1.0, time_limit)) // max(1, len(problem.ops)))
    fraction, misses, took = 0.3, 0, 0.0
    for k in range(40):
        began = time.monotonic()
        if best.peak <= floor or began + took > end or misses >= 8:
            break
        target = min(best.peak - 1, int(best.peak - (best.peak - floor) * fraction))
        found = _aim(annealer, best if k % 2 else plain, target, moves, seed + k, bold=k % 4 < 2)
        took = time.monotonic() - began
        if found is not None and found.peak < best.peak:
            best = found
        else:
            misses += 1
            fraction /= 2 if misses % 2 == 0 else 1
    return Smallest(floor, best.peak, best.events)


def _peak(outcome: Outcome) -> tuple[int, int]:
    return outcome.peak, outcome.cost


def _aim(
    annealer: Annealer, start: Outcome, budget: int, moves: int, seed: int, *, bold: bool
) -> Outcome | None:
    """A schedule inside the budget, found by annealing; ``bold``: whatever it costs."""
    shift = max(0, sum(max(0, x - budget) for x in start.live).bit_length() - 22)
    problem = annealer.problem
    unit = max(1, problem.total_time // 512) if bold else median_time(problem)
    result = annealer.round(
        start.events,
        budget,
        moves=moves,
        seed=seed,
        hot=unit * 4,
        cold=unit / 8,
        weight=max(16, unit * 64),
        shift=shift,
    )
    return None if result.best is None else evaluate(problem, result.best)


def _for_each_use(problem: Problem) -> frozenset[Event]:
    """After forward everything that forward made is made anew for each operator that reads it."""
    if len(problem.ops) > 800:
        return frozenset()
    events: set[Event] = set()
    for instant in range(problem.split, len(problem.ops)):
        stack = [problem.producer[s] for s in problem.reads[instant]]
        while stack:
            op = stack.pop()
            if 0 <= op < problem.split and problem.again[op] and (instant, op) not in events:
                events.add((instant, op))
                stack += [problem.producer[s] for s in problem.reads[op] if not problem.kept[s]]
    return frozenset(events)
