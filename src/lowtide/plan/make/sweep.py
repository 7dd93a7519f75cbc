"""The whole trade-off between memory and time: a plan for each of many budgets, monotone by construction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from lowtide.errors import InfeasibleError
from lowtide.graph import Graph
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.program.costs import Costs
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Decisions, HoldsFor, Plan, Side

__all__ = ["SHARES", "Point", "Sweep", "sweep", "sweep_by"]

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
"""Of the plain peak: the budgets that are tried, until one is too small."""


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One budget, and the best plan for it."""

    budget_bytes: int
    peak_bytes: int
    seconds: float
    overhead: float
    bound_overhead: float
    gap: float
    decisions: Decisions
    solve_seconds: float


class Sweep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Points from the largest budget to the smallest."""

    plain: Side
    points: tuple[Point, ...]
    smallest_budget_bytes: int
    floor_bytes: int
    """No plan exists below, as far as is proven."""
    cost: str
    only: tuple[str, ...]
    holds_for: HoldsFor = HoldsFor.NOTHING
    """The programs that bounds and floor are proven for; files of earlier versions do not say it."""
    interrupted: bool = False
    """Whether Ctrl-C ended it: smaller budgets were not tried."""
    lowtide: Literal["sweep"] = "sweep"
    version: Literal[1] = 1

    @property
    def most_overhead(self) -> float:
        """The overhead of the smallest budget."""
        return max((point.overhead for point in self.points), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """The sweep as plain JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def sweep(
    graph: Graph,
    costs: Costs,
    request: PlanRequest,
    room: DeviceRoom,
    *,
    shares: Sequence[float] = SHARES,
    able: Collection[int] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Plans for shares of the plain peak, down to the smallest that works, as ``sweep_by`` makes them."""

    def make(budget: Budget) -> Plan:
        return make_plan(graph, costs, replace(request, budget=budget), room, able=able)

    return sweep_by(make, shares=shares, progress=progress)


def sweep_by(
    make: Callable[[Budget], Plan],
    *,
    shares: Sequence[float] = SHARES,
    progress: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """The plans that are made for shares of the plain peak, down to the smallest that works.

    A plan for a small budget keeps every larger one too: where it is faster than what was found for the
    larger one, it takes its place, so that less memory never means less time. Bounds are monotone likewise.
    An interrupt (Ctrl-C) ends the sweep with the budgets so far, if there are any.
    """
    plans: list[Plan] = []
    floor = 0
    smallest: int | None = None
    interrupted = False

    def plan_for(budget: Budget) -> None:
        plans.append(make(budget))
        if plans[-1].interrupted:  # the best for this budget, and no more budgets
            raise KeyboardInterrupt

    try:
        for share in sorted(shares, reverse=True):
            progress(f"{share:.0%} …")
            try:
                plan_for(Budget(share=share))
            except InfeasibleError as error:
                smallest, floor = error.smallest_budget, error.floor
                break
        if smallest is not None and (not plans or smallest < plans[-1].budget_bytes):
            try:
                plan_for(Budget(bytes=smallest))
            except InfeasibleError:  # its plan is known, and was not found again in time
                if not plans:
                    raise
    except KeyboardInterrupt:
        interrupted = True
        if not plans:
            raise
    points = _monotone(plans)
    known = min(plan.smallest_budget_bytes for plan in plans)
    return Sweep(
        plain=plans[0].plain,
        points=tuple(points),
        smallest_budget_bytes=known if smallest is None else min(known, smallest),
        floor_bytes=floor,
        holds_for=plans[0].bound.holds_for,
        cost=plans[0].cost,
        only=tuple(plans[0].only),
        interrupted=interrupted,
    )


def _monotone(plans: Sequence[Plan]) -> list[Point]:
    best: Plan | None = None
    chosen: list[Plan] = []
    for plan in reversed(plans):
        if best is None or plan.predicted.seconds <= best.predicted.seconds:
            best = plan
        chosen.append(best)
    chosen.reverse()
    points: list[Point] = []
    bound = 0.0
    for plan, used in zip(plans, chosen, strict=True):
        bound = max(bound, plan.bound.overhead)
        base = plan.plain.seconds
        left = max(0.0, used.overhead - bound)
        points.append(
            Point(
                budget_bytes=plan.budget_bytes,
                peak_bytes=used.predicted.peak_bytes,
                seconds=used.predicted.seconds,
                overhead=used.overhead,
                bound_overhead=min(bound, used.overhead),
                gap=left * base / used.predicted.seconds if base else 0.0,
                decisions=used.decisions,
                solve_seconds=plan.solve_seconds,
            )
        )
    return points
