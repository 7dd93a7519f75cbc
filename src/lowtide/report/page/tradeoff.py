"""What every budget costs in time: our own curve with its bound, and the planners of others."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lowtide.errors import PlanError
from lowtide.plan.baselines import BASELINES, run_seconds
from lowtide.plan.make.sweep import Sweep
from lowtide.plan.program.simulate import simulate
from lowtide.plan.result.plan import HoldsFor, Plan, by_methods
from lowtide.report.page.types import Rival, TradeoffCurve

__all__ = ["curve_of_plans", "curve_of_sweep", "rivals_of"]

QUICK = {"chen": "Chen et al.", "lower-sets": "lower sets (Kusumoto et al.)", "dtr": "DTR"}
"""Planners of others that need no solver, and what people call them."""


def curve_of_sweep(sweep: Sweep, rivals: Sequence[Rival] = ()) -> TradeoffCurve:
    """The points of a sweep."""
    proven = sweep.holds_for is not HoldsFor.NOTHING
    words = f"bounds are proven {by_methods(sweep.only)}, {sweep.holds_for.words}" if proven else ""
    return TradeoffCurve(
        budget_bytes=tuple(point.budget_bytes for point in sweep.points),
        peak_bytes=tuple(point.peak_bytes for point in sweep.points),
        seconds=tuple(point.seconds for point in sweep.points),
        bound_seconds=tuple(
            sweep.plain.seconds + point.bound_overhead * _base(sweep, point.overhead, point.seconds)
            if proven
            else None
            for point in sweep.points
        ),
        plain_bytes=sweep.plain.peak_bytes,
        plain_seconds=sweep.plain.seconds,
        smallest_bytes=sweep.smallest_budget_bytes,
        floor_bytes=sweep.floor_bytes,
        cost=sweep.cost,
        words=words,
        rivals=tuple(rivals),
    )


def _base(sweep: Sweep, overhead: float, seconds: float) -> float:
    """What overheads are told against: the plain step, but for unit costs its forward part."""
    return (seconds - sweep.plain.seconds) / overhead if overhead else sweep.plain.seconds


def curve_of_plans(plans: Sequence[Plan]) -> TradeoffCurve | None:
    """The points that are known where nobody made a sweep: those of plans of the same step."""
    same = [plan for plan in plans if plan.plain == plans[0].plain and plan.cost == plans[0].cost]
    if not same:
        return None
    same.sort(key=lambda plan: -plan.budget_bytes)
    return TradeoffCurve(
        budget_bytes=tuple(plan.budget_bytes for plan in same),
        peak_bytes=tuple(plan.predicted.peak_bytes for plan in same),
        seconds=tuple(plan.predicted.seconds for plan in same),
        bound_seconds=tuple(
            None if plan.bound.holds_for is HoldsFor.NOTHING else plan.bound.seconds for plan in same
        ),
        plain_bytes=same[0].plain.peak_bytes,
        plain_seconds=same[0].plain.seconds,
        smallest_bytes=min(plan.smallest_budget_bytes for plan in same),
        floor_bytes=0,
        cost=same[0].cost,
        words="",
    )


def rivals_of(plan: Plan, budgets: Sequence[int], seconds: float) -> list[Rival]:
    """What the planners of others find for the same step and costs, each in its share of the seconds."""
    if not plan.seconds or plan.decisions.tiles:
        return []
    found = []
    for name, called in QUICK.items():
        began = time.perf_counter()
        peaks, times = [], []
        for budget in sorted(budgets, reverse=True):
            if time.perf_counter() - began > seconds / len(QUICK):
                break
            try:
                program = BASELINES[name](
                    plan.graph, plan.seconds, budget - plan.beside_bytes, workspace_bytes=plan.workspace_bytes
                )
            except PlanError:
                break
            peak = simulate(plan.graph, program, workspace_bytes=plan.workspace_bytes).peak_bytes
            peaks.append(peak + plan.beside_bytes)
            times.append(run_seconds(program, plan.seconds))
        if peaks:
            found.append(Rival(called, tuple(peaks), tuple(times)))
    return found
