"""State: what a search for a schedule knows so far, and how much time it has left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lowtide.plan import time_shares
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.problem.problem import Problem, median_time
from lowtide.plan.problem.schedule import Outcome, evaluate
from lowtide.plan.request import Limits

__all__ = ["LARGE", "SLACK", "State"]

LARGE = 300
"""From so many operators on, a search may leave a little open."""
SLACK = 1e-4
"""That little, as a share of the time of the plain step."""
_ROUNDING = 1e-7
"""A cost above the bound by no more than this share equals it: the solver works in floating point."""


@dataclass
class State:
    """The best schedule and the best bound, with the limits of the search."""

    problem: Problem
    budget: int
    limits: Limits
    relaxation: Relaxation | None
    """What bounds are proven with; None: schedules keep the problem's order, and bounds are for those."""
    effort: float = 0.0
    """Seconds that the number of moves is for; the time limit if 0."""
    began: float = field(default_factory=time.monotonic)
    best: Outcome | None = None
    there: Problem | None = None
    """The problem of the best schedule, where that has another order or needs pauses."""
    method: str = ""
    bound: int = 0
    impossible: bool = False
    """Whether it is proven that no schedule fits."""
    interrupted: bool = False
    late: bool = False
    overtime: bool = False
    """Whether what runs now may go on where time is up."""

    def __post_init__(self) -> None:
        self.plain = evaluate(self.problem, ())
        self.median = median_time(self.problem)
        self.large = len(self.problem.ops) >= LARGE
        self.time_limit, self.seed = self.limits.time_limit, self.limits.seed

    def offer(self, outcome: Outcome, method: str, there: Problem | None = None) -> None:
        """Take a schedule as the best if it is; ``there`` is its problem, where that is another."""
        if outcome.peak <= self.budget and (self.best is None or outcome.cost < self.best.cost):
            self.best, self.method = outcome, method
            self.there = None if there is self.problem else there
            self.report()  # may end in an interrupt: the best is whole by now

    def report(self) -> None:
        """Tell whoever watches."""
        if self.limits.progress is None:
            return
        best = None if self.best is None else self.problem.seconds(self.best.cost)
        bound = self.problem.seconds(self.bound)
        total = self.problem.seconds(self.problem.total_time)
        gap = None if best is None or not total else max(0.0, best - bound) / (total + best)
        self.limits.progress(time.monotonic() - self.began, best, bound, gap)

    def left(self) -> float:
        """Seconds to the deadline."""
        return self.until(time_shares.ENDING) - time.monotonic()

    def until(self, share: float) -> float:
        """When a share of the time limit is over."""
        return self.began + share * self.time_limit

    def done(self) -> bool:
        """Nothing can or may be gained any more."""
        slack = int((SLACK if self.large else _ROUNDING) * self.problem.total_time)
        if self.impossible or (self.best is not None and self.best.cost - self.bound <= slack):
            return True
        reserve = time_shares.RESERVE * self.time_limit if self.best is None else 0.0
        self.late = self.late or self.left() <= reserve
        return self.late and not self.overtime
