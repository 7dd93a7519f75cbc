"""Found: what a search for a schedule of recomputation gives."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plan.problem.lower import lower
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event
from lowtide.plan.program.instructions import Program
from lowtide.plan.recompute.smallest_budget import Smallest

__all__ = ["LOWEST", "Found"]

LOWEST = "lowest peak"
"""The method of a plan that aims at memory alone: no time was left to look for a faster one."""


@dataclass(frozen=True)
class Found:
    """A schedule inside the budget, and how good it is proven to be."""

    problem: Problem
    budget: int
    events: frozenset[Event]
    cost: int
    """Time spent on running operators again, in units of the problem."""
    bound: int
    """No valid program inside the budget spends less, in any order of the operators."""
    peak: int
    smallest: Smallest
    floor: int
    """No budget below this can work, in any order of the operators."""
    method: str
    """Which step of the portfolio gave the schedule."""
    solve_seconds: float
    interrupted: bool = False
    """Whether the search was stopped from outside and gave the best it had."""
    stopped_by_time: bool = False

    @property
    def overhead_seconds(self) -> float:
        """Seconds that the schedule adds to the plain step."""
        return self.problem.seconds(self.cost)

    @property
    def bound_seconds(self) -> float:
        """Seconds that every schedule inside the budget adds at least."""
        return self.problem.seconds(self.bound)

    @property
    def gap(self) -> float:
        """What may be left to gain, as a share of the time of the whole planned step."""
        total = self.problem.total_time + self.cost
        return (self.cost - self.bound) / total if total else 0.0

    @property
    def program(self) -> Program:
        """The schedule as a Program."""
        return lower(self.problem, self.events)
