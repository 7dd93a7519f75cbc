"""search(problem, budget): the fastest plan that could be found inside a budget, with its proof.

Recomputation is planned by the portfolio, offload by :mod:`lowtide.plan.offload.search`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from lowtide.errors import PlanError
from lowtide.plan.bounds.lower_bounds import smallest_conceivable
from lowtide.plan.bounds.relaxation import relax
from lowtide.plan.offload.search import with_offload
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.recompute.found import Found
from lowtide.plan.recompute.portfolio import Progress, recompute
from lowtide.plan.recompute.refusal import refusal
from lowtide.plan.recompute.smallest_budget import smallest_budget

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
    others: Sequence[Sequence[int]] = (),
) -> Found:
    """The fastest plan found inside ``budget`` bytes; an InfeasibleError names a budget that works.

    What is proven of it holds for every valid program that uses these means, in any order of the operators.

    ``only`` says which means a plan may use: recompute, offload, or both; offload needs the ``link`` to the
    host. ``starts`` are schedules known already, as from another budget; ``others`` other orders of the
    operators, tried where time is left. An interrupt (Ctrl-C) ends the search and gives the best plan so far,
    if there is one.
    """
    unknown = sorted(set(only) - _MEANS)
    if unknown or not only:
        raise PlanError(f"a plan may use recompute, offload or both, not {', '.join(unknown) or 'nothing'}")
    if "recompute" not in only:
        never = (False,) * len(problem.ops)
        problem = replace(problem, asked=never, again=never)
    relaxation = relax(problem)
    if "offload" not in only:
        return recompute(
            problem,
            budget,
            relaxation,
            time_limit=time_limit,
            seed=seed,
            progress=progress,
            starts=starts,
            others=others,
        )
    if link is None:
        raise PlanError("offload needs the rates of the link between device and host")
    floor = smallest_conceivable(relaxation, offload=True)
    best, bound, proven = with_offload(
        problem, budget, link, relaxation, time_limit=time_limit, seed=seed, progress=progress
    )
    if best is not None:
        return replace(best, floor=floor)
    known = smallest_budget(
        problem, time_limit=_LOWEST * time_limit, seed=seed, effort=time_limit, enough=budget
    )
    if known.budget > budget:
        raise refusal(budget, known, floor=floor, proven=proven or budget < floor)
    last = recompute(
        problem, budget, relaxation, time_limit=_LAST * time_limit, seed=seed, starts=[known.events]
    )
    # its own bound is that of recomputation alone
    return replace(last, bound=min(bound, last.cost), floor=floor)
