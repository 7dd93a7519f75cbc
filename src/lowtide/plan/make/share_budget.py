"""One budget for a step in several graphs: how much of it each graph may take.

Forward runs the graphs one after the other, backward the other way round. While one of them runs, those
before it hold what their backward needs. So a graph that takes more leaves less to all behind it:

    around + what graphs before it hold + its own peak <= budget        for every call of a graph

All graphs get the same share of the way from their smallest peak to their plain one, the largest that fits.
Then, from the last to the first, each takes what is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowtide.errors import InfeasibleError
from lowtide.units import format_bytes

__all__ = ["GraphCall", "GraphPlan", "SharedGraph", "share_budget", "shared_peak"]

_HALVINGS = 5
"""The share is found to one part in two to this power."""

PlanType = TypeVar("PlanType")


@dataclass(frozen=True, slots=True)
class GraphPlan(Generic[PlanType]):
    """A plan of one graph, and what it takes."""

    peak_bytes: int
    """Of the graph alone, with what goes in."""
    held_bytes: int
    """What it holds from the end of its forward to its backward, besides what goes in and comes out."""
    seconds: float
    plan: PlanType


@dataclass(frozen=True, slots=True)
class SharedGraph(Generic[PlanType]):
    """One of the graphs of a step."""

    smallest_bytes: int
    """The smallest peak that it has a plan for."""
    plain_bytes: int
    plan: Callable[[int], GraphPlan[PlanType]]
    """Gives a plan with at most this peak."""

    def at(self, share: float) -> GraphPlan[PlanType]:
        """The plan at a share of the way from the smallest peak to the plain one."""
        return self.plan(self.smallest_bytes + int(share * (self.plain_bytes - self.smallest_bytes)))


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call of a graph in forward, in the order of calls."""

    graph: int
    around_bytes: int
    """What is on the device meanwhile, but for what the graphs hold and what goes into this one."""


def shared_peak(calls: Sequence[GraphCall], plans: Sequence[GraphPlan[PlanType]], at_end: int = 0) -> int:
    """The peak of the step by these plans.

    ``at_end`` is on the device when forward ends, besides what graphs hold.
    """
    held = peak = 0
    for call in calls:
        plan = plans[call.graph]
        peak = max(peak, call.around_bytes + held + plan.peak_bytes)
        held += plan.held_bytes
    return max(peak, at_end + held)


def share_budget(
    graphs: Sequence[SharedGraph[PlanType]], calls: Sequence[GraphCall], budget: int, at_end: int = 0
) -> list[GraphPlan[PlanType]]:
    """A plan for each graph, so that the step stays inside the budget, with ``at_end`` as in ``shared_peak``.

    An InfeasibleError names a budget that works.
    """
    plain = [graph.plan(graph.plain_bytes) for graph in graphs]
    if shared_peak(calls, plain, at_end) <= budget:
        return plain
    best = [graph.plan(graph.smallest_bytes) for graph in graphs]
    least = shared_peak(calls, best, at_end)
    if least > budget:
        raise InfeasibleError(
            f"no plan fits {format_bytes(budget)} ({budget} bytes) for the {len(graphs)} graphs of this "
            f"step; the smallest budget with a known plan is {format_bytes(least)} ({least} bytes)",
            budget=budget,
            smallest_budget=least,
            floor=0,
            holds_for="nothing",
        )
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        found = [graph.at(share) for graph in graphs]
        if shared_peak(calls, found, at_end) <= budget:
            low, best = share, found
        else:
            high = share
    last = {call.graph: k for k, call in enumerate(calls)}
    for k in sorted(last, key=lambda graph: -last[graph]):
        allowed = min(_allowed(calls, best, k, budget), graphs[k].plain_bytes)
        more = graphs[k].plan(allowed) if allowed > best[k].peak_bytes else best[k]
        tried = [*best[:k], more, *best[k + 1 :]]
        if more.seconds < best[k].seconds and shared_peak(calls, tried, at_end) <= budget:
            best = tried
    return best


def _allowed(
    calls: Sequence[GraphCall], plans: Sequence[GraphPlan[PlanType]], graph: int, budget: int
) -> int:
    """The peak that a graph may have where those before it hold what they do."""
    held, allowed = 0, budget
    for call in calls:
        if call.graph == graph:
            allowed = min(allowed, budget - call.around_bytes - held)
        held += plans[call.graph].held_bytes
    return allowed
