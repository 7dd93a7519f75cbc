"""cheapest(problem, budget, relaxation): the optimum of a small problem in any order, and what that proves.

The planner's rules allow fewer programs than are valid. Where they differ the shortest path is looked for
twice: once by the rules, for a schedule, and once in the relaxation, for a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.problem.pauses import as_events
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.reorder import in_order
from lowtide.plan.problem.schedule import Event, evaluate
from lowtide.plan.recompute.shortest_path import Exact, exact
from lowtide.plan.recompute.smallest_budget import Smallest

__all__ = ["Cheapest", "cheapest", "smallest_exactly"]


@dataclass(frozen=True, slots=True)
class Cheapest:
    """What the shortest path has shown."""

    bound: int
    """No program inside the budget spends less on running again."""
    impossible: bool
    """Whether no program fits the budget at all."""
    schedule: tuple[Problem, frozenset[Event]] | None
    """One that is cheaper than what was known, with the problem in its order, and with pauses."""


def cheapest(
    problem: Problem,
    budget: int,
    relaxation: Relaxation | None,
    *,
    known: int | None,
    states: int,
    deadline: float,
) -> Cheapest:
    """The cheapest schedule, if it costs less than ``known`` and there are no more than so many states.

    Without a relaxation the operators keep the problem's order, and so does what is proven.
    """
    if relaxation is None:
        before = tuple((1 << v) - 1 for v in range(len(problem.ops)))
        found = exact(problem, budget, before, known=known, states=states, deadline=deadline)
        return _told(found, known, _scheduled(problem, found))
    order = relaxation.precedence
    found = exact(problem, budget, order.planned, known=known, states=states, deadline=deadline)
    schedule = _scheduled(problem, found)
    if relaxation.only_order and order.planned == order.before:
        return _told(found, known, schedule)
    if problem.short:  # a short run holds less than the shortest path counts with
        return Cheapest(0, False, schedule)
    proof = exact(
        relaxation.problem,
        budget,
        order.before,
        at_end=relaxation.at_end,
        known=known if schedule is None else found.bound,
        states=states,
        deadline=deadline,
    )
    return _told(proof, known if schedule is None else found.bound, schedule)


def smallest_exactly(
    known: Smallest, relaxation: Relaxation, floor: int, *, states: int, deadline: float
) -> Smallest:
    """The smallest budget of a small problem in any order, as far as the shortest path reaches in time."""
    best, low, problem = known, floor, known.problem
    while low < best.budget:
        budget = (low + best.budget) // 2
        found = exact(problem, budget, relaxation.precedence.planned, states=states, deadline=deadline)
        schedule = _scheduled(problem, found)
        if schedule is not None:
            there, events = schedule
            peak = evaluate(there, events).peak
            if peak > budget:  # with its charges
                break
            best = Smallest(peak, events, there)
        elif found.finished:
            low = budget + 1
        else:
            break
    return best


def _told(proof: Exact, known: int | None, schedule: tuple[Problem, frozenset[Event]] | None) -> Cheapest:
    impossible = proof.finished and proof.runs is None and known is None
    return Cheapest(0 if impossible else proof.bound, impossible, schedule)


def _scheduled(problem: Problem, found: Exact) -> tuple[Problem, frozenset[Event]] | None:
    """The runs of a shortest path as a schedule of the problem in the order of their first runs."""
    if found.runs is None:
        return None
    order = list(dict.fromkeys(found.runs))
    place = {op: k for k, op in enumerate(order)}
    there = in_order(problem, order) if order != sorted(order) else problem
    return as_events(there, [place[op] for op in found.runs])
