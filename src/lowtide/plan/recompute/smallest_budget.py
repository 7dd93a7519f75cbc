"""The smallest budget for which a schedule is known, in one order of the operators."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lowtide.plan.problem.problem import Problem, median_time
from lowtide.plan.problem.schedule import Event, Outcome, evaluate
from lowtide.plan.recompute.annealing.kernel import Annealer, Cooling
from lowtide.plan.recompute.greedy import greedy

__all__ = ["Smallest", "lowest_in_order", "smallest_budget"]


@dataclass(frozen=True, slots=True)
class Smallest:
    """How far memory can be lowered."""

    budget: int
    """The smallest budget for which a schedule is known."""
    events: frozenset[Event]
    """That schedule."""
    problem: Problem
    """The problem that it is a schedule of."""


def smallest_budget(
    problem: Problem, *, time_limit: float = 5.0, seed: int = 0, effort: float = 1.0, enough: int = 0
) -> Smallest:
    """The schedule with the lowest peak that could be found in the problem's order, whatever it costs.

    What is tried depends on the seed and on ``effort``, up to 1; the time limit only ends it, as does a peak
    of ``enough``. So what was found once is found again in as much time.
    """
    end = time.monotonic() + time_limit
    floor = lowest_in_order(problem)
    annealer = Annealer(problem)
    best = evaluate(problem, ())
    for start in (_for_each_use(problem), greedy(problem, floor), greedy(problem, floor + floor // 10)):
        best = min(best, evaluate(problem, start), key=_peak)
    plain = evaluate(problem, ())
    moves = max(10_000, int(12_000_000 * min(1.0, effort)) // max(1, len(problem.ops)))
    fraction, misses, took = 0.3, 0, 0.0
    for k in range(40):
        began = time.monotonic()
        if best.peak <= max(floor, enough) or began + took > end or misses >= 8:
            break
        target = min(best.peak - 1, int(best.peak - (best.peak - floor) * fraction))
        found = _aim(annealer, best if k % 2 else plain, target, moves, seed + k, bold=k % 4 < 2)
        took = time.monotonic() - began
        if found is not None and found.peak < best.peak:
            best = found
        else:
            misses += 1
            fraction /= 2 if misses % 2 == 0 else 1
    return Smallest(best.peak, best.events, problem)


def lowest_in_order(problem: Problem) -> int:
    """No schedule in the problem's order needs less: the largest working set beside what stays anyway."""
    last = [max(readers, default=-1) for readers in problem.readers]
    held = {s for s, p in enumerate(problem.producer) if p < 0 and last[s] >= 0}
    ends: dict[int, set[int]] = {}
    for s in held:
        ends.setdefault(last[s], set()).add(s)
    staying = sum(problem.bytes[s] for s in held)
    most = problem.resident
    for op, (reads, writes) in enumerate(zip(problem.reads, problem.writes, strict=True)):
        own = {*reads, *writes} - held
        need = problem.fixed[op] + problem.workspace[op] + staying + sum(problem.bytes[s] for s in own)
        if problem.over[op] >= 0:
            need -= problem.bytes[problem.over[op]]
        most = max(most, need)
        new = {s for s in writes if problem.kept[s]}
        gone = ends.get(op, set())
        staying += sum(problem.bytes[s] for s in new) - sum(problem.bytes[s] for s in gone)
        held |= new
        held -= gone
    return most


def _peak(outcome: Outcome) -> tuple[int, int]:
    return outcome.peak, outcome.cost


def _aim(
    annealer: Annealer, start: Outcome, budget: int, moves: int, seed: int, *, bold: bool
) -> Outcome | None:
    """A schedule inside the budget, found by annealing; ``bold``: whatever it costs."""
    shift = max(0, sum(max(0, x - budget) for x in start.live).bit_length() - 22)
    problem = annealer.problem
    unit = max(1, problem.total_time // 512) if bold else median_time(problem)
    cooling = Cooling(unit * 4, unit / 8, max(16, unit * 64), shift)
    result = annealer.round(start.events, budget, cooling, moves=moves, seed=seed)
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
