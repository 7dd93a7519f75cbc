"""The trade-off curve: plans for several budgets, never more expensive where there is more memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from lowtide.errors import InfeasibleError
from lowtide.plan.lanes import Link
from lowtide.plan.problem import Problem
from lowtide.plan.search import Found, search

__all__ = ["sweep"]


def sweep(
    problem: Problem,
    budgets: Iterable[int],
    *,
    time_limit: float = 10.0,
    seed: int = 0,
    only: Collection[str] = frozenset({"recompute"}),
    link: Link | None = None,
) -> dict[int, Found | InfeasibleError]:
    """A plan for each budget, or why there is none; ``time_limit`` seconds each.

    From small to large: a plan for a smaller budget fits every larger one, and a bound for a larger budget
    holds for every smaller one.
    """
    found: dict[int, Found | InfeasibleError] = {}
    best: Found | None = None
    for budget in sorted(set(budgets)):
        starts = [best.events] if best is not None and best.problem is problem else []
        try:
            plan = search(
                problem, budget, time_limit=time_limit, seed=seed, only=only, link=link, starts=starts
            )
        except InfeasibleError as error:
            found[budget] = error
            continue
        if best is not None and best.cost <= plan.cost:
            plan = replace(best, budget=budget, bound=plan.bound, solve_seconds=plan.solve_seconds)
        best = found[budget] = plan
    floor = 0
    for budget in sorted(found, reverse=True):
        one = found[budget]
        if isinstance(one, Found):
            floor = max(floor, one.bound)
            found[budget] = replace(one, bound=min(floor, one.cost))
    return found
