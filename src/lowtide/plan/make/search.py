"""search(problem, budget): the fastest plan that could be found inside a budget, with its proof.

Recomputation is planned by the portfolio, offload by :mod:`lowtide.plan.offload.search`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from lowtide.errors import PlanError
from lowtide.plan import time_shares
from lowtide.plan.bounds.lower_bounds import smallest_conceivable
from lowtide.plan.bounds.relaxation import relax
from lowtide.plan.offload.search import with_offload
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.recompute.found import Found
from lowtide.plan.recompute.portfolio import recompute
from lowtide.plan.recompute.refusal import refusal
from lowtide.plan.recompute.smallest_budget import smallest_budget
from lowtide.plan.request import Limits

__all__ = ["restricted", "search"]

_METHODS = frozenset({"recompute", "offload"})


def search(
    problem: Problem,
    budget: int,
    limits: Limits,
    *,
    methods: Collection[str] = ("recompute",),
    link: Link | None = None,
    starts: Iterable[Iterable[Event]] = (),
    others: Sequence[Sequence[int]] = (),
) -> Found:
    """The fastest plan found inside ``budget`` bytes; an InfeasibleError names a budget that works.

    What is proven of it holds for every valid program that uses these methods, in any order of the operators.

    ``methods`` are recompute, offload, or both; offload needs the ``link`` to the host. ``starts`` are
    schedules known already, as from another budget; ``others`` other orders of the operators, tried where
    time is left. An interrupt (Ctrl-C) ends the search and gives the best plan so far, if there is one.
    """
    unknown = sorted(set(methods) - _METHODS)
    if unknown or not methods:
        raise PlanError(f"a plan may use recompute, offload or both, not {', '.join(unknown) or 'nothing'}")
    problem = restricted(problem, methods)
    relaxation = relax(problem)
    if "offload" not in methods:
        return recompute(problem, budget, relaxation, limits, starts=starts, others=others)
    if link is None:
        raise PlanError(
            "offload needs the rates of the link between device and host; plan on a GPU, or by "
            "recompute alone"
        )
    floor = smallest_conceivable(relaxation, offload=True)
    best, bound, proven = with_offload(problem, budget, link, relaxation, limits)
    if best is not None:
        return replace(best, floor=floor)
    seconds, seed = limits.time_limit, limits.seed
    known = smallest_budget(
        problem, time_limit=time_shares.OFFLOAD_LOWEST * seconds, seed=seed, effort=seconds, enough=budget
    )
    if known.budget > budget:
        raise refusal(budget, known, floor=floor, proven=proven or budget < floor)
    last = recompute(
        problem, budget, relaxation, Limits(time_shares.OFFLOAD_LAST * seconds, seed), starts=[known.events]
    )
    # its own bound is that of recomputation alone
    return replace(last, bound=min(bound, last.cost), floor=floor)


def restricted(problem: Problem, methods: Collection[str]) -> Problem:
    """The same in which nothing runs twice, unless recomputation is one of the methods."""
    if "recompute" in methods:
        return problem
    never = (False,) * len(problem.ops)
    return replace(problem, asked=never, again=never)
