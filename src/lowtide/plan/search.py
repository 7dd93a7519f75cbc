"""search(problem, budget): the fastest plan that could be found inside a budget, with its proof.

Recomputation is planned by the portfolio; what may wait on the host besides, by :mod:`lowtide.plan.away`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from lowtide.errors import PlanError
from lowtide.plan.away import with_offload
from lowtide.plan.found import Found
from lowtide.plan.lanes import Link
from lowtide.plan.portfolio import Progress, recompute, refusal
from lowtide.plan.problem import Problem
from lowtide.plan.schedule import Event
from lowtide.plan.smallest import smallest_budget

__all__ = ["Found", "Link", "Progress", "search"]

_MEANS = frozenset({"recompute", "offload"})
_LOWEST = 0.2
"""Of the time limit, for the lowest peak where nothing is found with offload."""
_LAST = 0.1
"""Of the time limit, for a plan from there on."""


def search(
    problem: Problem,
    budget: int,
    *,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
    only: Collection[str] = frozenset({"recompute"}),
    link: Link | None = None,
    starts: Iterable[Iterable[Event]] = (),
) -> Found:
    """The fastest plan found inside ``budget`` bytes; an InfeasibleError names a budget that works.

    ``only`` says which means a plan may use: recompute, offload, or both; offload needs the ``link`` to the
    host. ``starts`` are schedules known already, as from another budget. An interrupt (Ctrl-C) ends the
    search and gives the best plan so far, if there is one.
    """
    unknown = sorted(set(only) - _MEANS)
    if unknown or not only:
        raise PlanError(f"a plan may use recompute, offload or both, not {', '.join(unknown) or 'nothing'}")
    if "recompute" not in only:
        problem = replace(problem, again=(False,) * len(problem.ops))
    if "offload" not in only:
        return recompute(problem, budget, time_limit=time_limit, seed=seed, progress=progress, starts=starts)
    if link is None:
        raise PlanError("offload needs the rates of the link between device and host")
    best, proven = with_offload(problem, budget, link, time_limit=time_limit, seed=seed, progress=progress)
    if best is None:
        known = smallest_budget(problem, time_limit=_LOWEST * time_limit, seed=seed)
        if known.budget <= budget:
            return recompute(problem, budget, time_limit=_LAST * time_limit, seed=seed, starts=[known.events])
        raise refusal(problem, budget, known, proven=proven)
    return best
