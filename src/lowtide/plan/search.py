"""search(problem, budget): the fastest plan that could be found inside a budget, with its proof.

Recomputation is planned by the portfolio. With offload, a cut program chooses what goes to the host, as far
as the link reaches; what is left is recomputation again, and a simulation with the link's lanes has the last
word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from math import ceil

from lowtide.errors import InfeasibleError, PlanError
from lowtide.plan.cut import solve_cuts
from lowtide.plan.lanes import Link
from lowtide.plan.lower import lower
from lowtide.plan.offload import Trip, hurried, prefix, trips, with_trips
from lowtide.plan.portfolio import Found, Progress, recompute
from lowtide.plan.problem import Problem
from lowtide.plan.schedule import Event, evaluate
from lowtide.plan.simulate import simulate

__all__ = ["Found", "Link", "Progress", "search"]

_MEANS = frozenset({"recompute", "offload"})
_TRIES = (
    (1.0, 1.0, False),
    (1.0, 0.97, True),
    (0.9, 0.97, False),
    (0.7, 0.93, False),
    (1.0, 0.85, True),
    (1.0, 0.6, True),
)
"""Shares of the link and of the budget that the host's part is chosen for; whether copies are waited for."""


_ALONE = ((1.0, True), (1.04, True), (1.1, True), (1.0, False), (1.2, True))
_MIXED = ((0.5, True), (0.75, True), (1.0, True), (0.25, True), (0.6, False), (0.9, True), (1.1, True))
"""Shares of what is too much that go to the host, first made first; whether copies are waited for."""
_DEAR = (0.5, 0.8)
"""With recomputation, also only storages that take longer to make again, by the byte, than such a share."""


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
    return _with_offload(problem, budget, link, time_limit, seed, progress, frozenset(only))


def _with_offload(
    problem: Problem,
    budget: int,
    link: Link,
    time_limit: float,
    seed: int,
    progress: Progress | None,
    means: frozenset[str],
) -> Found:
    began = time.monotonic()
    plain = evaluate(problem, ())
    best: Found | None = None
    refusal: InfeasibleError | None = None
    try:
        best = recompute(problem, budget, time_limit=time_limit * 0.4, seed=seed)
        if plain.peak <= budget:
            return best
    except InfeasibleError as error:
        refusal = error
    cut = max(range(len(plain.live)), key=plain.live.__getitem__)
    bound = solve_cuts(problem, budget, [cut], seconds=time_limit * 0.1, link=link).bound

    def left() -> float:
        return time_limit - (time.monotonic() - began)

    for moved, patient in _candidates(problem, budget, cut, plain.peak, link, left, "recompute" in means):
        taken = trips(problem, moved, cut, link, patient=patient)
        if patient:
            taken = hurried(problem, taken, plain.live, budget, cut)
        found = _try(problem, budget, link, taken, max(0.2, left() / 5), seed)
        if found is not None and (best is None or found.cost < best.cost):
            best = found
            _report(progress, best, bound, began)
        if left() <= 0 or (best is not None and best.cost <= bound):
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return replace(best, bound=min(bound, best.cost), solve_seconds=time.monotonic() - began)


def _candidates(
    problem: Problem,
    budget: int,
    cut: int,
    peak: int,
    link: Link,
    left: Callable[[], float],
    recomputing: bool,
) -> Iterator[tuple[Collection[int], bool]]:
    """Sets of storages for the host, and whether copies are waited for: by cut programs, then first made."""
    for share, part, patient in _TRIES:
        slower = Link(link.to_host * share, link.to_device * share)
        seconds = max(0.1, left() / 8)
        yield (
            solve_cuts(problem, int(budget * part), [cut], nodes=500, seconds=seconds, link=slower).moved,
            patient,
        )
    for share, patient in _MIXED if recomputing else _ALONE:
        for dear in (0.0, *_DEAR) if recomputing else (0.0,):
            yield prefix(problem, cut, int((peak - budget) * share), dear), patient


def _try(
    problem: Problem, budget: int, link: Link, taken: list[Trip], seconds: float, seed: int
) -> Found | None:
    """The plan with these storages on the host, if there is one; waiting is part of its cost."""
    if not taken:
        return None
    moved = with_trips(problem, taken)
    try:
        found = recompute(moved, budget, time_limit=seconds, seed=seed)
    except InfeasibleError:
        return None
    cost = _overhead(moved, found.events, link)
    return replace(found, cost=cost, bound=0, method=f"offload, {found.method}")


def _overhead(problem: Problem, events: Iterable[Event], link: Link) -> int:
    """Time beyond that of the plain step: running again, and waiting for copies."""
    seconds = [0.0] * len(problem.graph.ops)
    for op, spent in zip(problem.ops, problem.time, strict=True):
        if op >= 0:
            seconds[op] = problem.seconds(spent)
    timeline = simulate(problem.graph, lower(problem, events), seconds=seconds, link=link)
    return max(0, ceil((sum(timeline.seconds) - sum(seconds)) * problem.scale * (1 - 1e-9)))


def _report(progress: Progress | None, best: Found, bound: int, began: float) -> None:
    if progress is not None:
        gap = max(0, best.cost - bound) / max(1, best.problem.total_time + best.cost)
        progress(
            time.monotonic() - began, best.overhead_seconds, best.problem.seconds(min(bound, best.cost)), gap
        )
