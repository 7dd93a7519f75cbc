"""One budget for a step in several graphs: how much of it each graph may take.

Forward runs the graphs one after the other, backward the other way round. While one of them runs, those
before it hold what their backward needs. So a graph that holds more leaves less to all behind it:

    around + what graphs before it hold + its own peak <= budget        for every call of a graph

Every graph may hold the same share of what it can: from the least that it has a plan for to what it holds
where nothing is recomputed. Its peak may be what the others leave. Several shares are tried. Then, from the
last graph to the first, each takes what is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowtide.errors import InfeasibleError
from lowtide.units import format_bytes

__all__ = ["GraphCall", "GraphPlan", "SharedGraph", "least_plans", "share_budget", "shared_peak"]

_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
"""Of what graphs can hold, those that are tried."""
_WORSE = 2
"""So many shares in a row may be slower than the best before no more are tried."""
_SWEEPS = 2
"""The smallest plan of every graph is chosen anew so many times, beside those of the others."""

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

    plain: GraphPlan[PlanType]
    """Its plan that recomputes nothing."""
    passing_bytes: int
    """What goes in and comes out."""
    within: Callable[[int, int], GraphPlan[PlanType]]
    """Gives a plan with at most this peak, which holds at most so much. An InfeasibleError: there is none."""
    least: Callable[[int], GraphPlan[PlanType]]
    """Gives the plan that takes least where others need so many bytes between its forward and backward."""

    @property
    def leanest(self) -> GraphPlan[PlanType]:
        """The plan that holds least."""
        return self.least(self.plain.peak_bytes)

    def needs(self, more: int) -> list[int]:
        """What others may need, for plans to choose from: less peak or less to hold.

        Behind its calls they need so much ``more`` than is there beside it.
        """
        low = max(0, self.least(0).peak_bytes - self.passing_bytes)
        high = self.plain.peak_bytes
        return sorted({max(0, more - self.passing_bytes), low, (low + high) // 2, high})


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
    return max(
        around + held + peak
        for _, around, held, peak in _instants(calls, [p.held_bytes for p in plans], plans, at_end)
    )


def share_budget(
    graphs: Sequence[SharedGraph[PlanType]], calls: Sequence[GraphCall], budget: int, at_end: int = 0
) -> list[GraphPlan[PlanType]]:
    """A plan for each graph, so that the step stays inside the budget, with ``at_end`` as in ``shared_peak``.

    An InfeasibleError names a budget that works.
    """
    plain = [graph.plain for graph in graphs]
    if shared_peak(calls, plain, at_end) <= budget:
        return plain
    best: list[GraphPlan[PlanType]] | None = None
    worse = 0
    for share in _SHARES:
        found = _at(graphs, calls, budget, at_end, share)
        if found is None:
            continue
        if best is None or _seconds(calls, found) < _seconds(calls, best):
            best, worse = found, 0
        else:
            worse += 1
        if worse >= _WORSE:
            break
    if best is None:
        best = least_plans(graphs, calls, at_end)
        smallest = shared_peak(calls, best, at_end)
        if smallest > budget:
            raise InfeasibleError(
                f"no plan fits {format_bytes(budget)} ({budget} bytes) for the {len(graphs)} graphs of this "
                f"step; the smallest budget with a known plan is {format_bytes(smallest)} ({smallest} bytes)",
                budget=budget,
                smallest_budget=smallest,
                floor=0,
                holds_for="nothing",
            )
    return _with_what_is_left(graphs, calls, best, budget, at_end)


def least_plans(
    graphs: Sequence[SharedGraph[PlanType]], calls: Sequence[GraphCall], at_end: int = 0
) -> list[GraphPlan[PlanType]]:
    """A plan for each graph, so that the step takes as little as could be found."""

    def takes(plans: Sequence[GraphPlan[PlanType]]) -> tuple[int, int]:
        return shared_peak(calls, plans, at_end), sum(plans[call.graph].held_bytes for call in calls)

    found = []
    for best in ([graph.least(0) for graph in graphs], [graph.leanest for graph in graphs]):
        for _ in range(_SWEEPS):
            for k in _last_first(calls):
                own, later = _needed(calls, best, k, at_end)
                for others in graphs[k].needs(later - own):
                    tried = [*best[:k], graphs[k].least(others), *best[k + 1 :]]
                    best = min(best, tried, key=takes)
        found.append(best)
    return min(found, key=takes)


def _at(
    graphs: Sequence[SharedGraph[PlanType]],
    calls: Sequence[GraphCall],
    budget: int,
    at_end: int,
    share: float,
) -> list[GraphPlan[PlanType]] | None:
    """Plans that hold such a share; None where they do not fit."""
    held = [
        least + int(share * max(0, graph.plain.held_bytes - least))
        for graph, least in ((graph, graph.leanest.held_bytes) for graph in graphs)
    ]
    if calls:  # nobody comes behind the last one
        last, times = calls[-1].graph, sum(call.graph == calls[-1].graph for call in calls)
        if times == 1:
            others = sum(held[call.graph] for call in calls[:-1])
            held[last] = max(0, budget - at_end - others)
    allowed = [graph.plain.peak_bytes for graph in graphs]
    for call, around, before, _ in _instants(calls, held, (), at_end):
        if call is None and around + before > budget:
            return None
        if call is not None:
            allowed[call.graph] = min(allowed[call.graph], budget - around - before)
    found: list[GraphPlan[PlanType]] = []
    try:
        for graph, peak, most in zip(graphs, allowed, held, strict=True):
            found.append(graph.within(peak, most))
    except InfeasibleError:
        return None
    return found if shared_peak(calls, found, at_end) <= budget else None


def _with_what_is_left(
    graphs: Sequence[SharedGraph[PlanType]],
    calls: Sequence[GraphCall],
    plans: list[GraphPlan[PlanType]],
    budget: int,
    at_end: int,
) -> list[GraphPlan[PlanType]]:
    """From the last graph to the first, each with what the others leave."""
    best = plans
    for k in _last_first(calls):
        own, later = _needed(calls, best, k, at_end)
        peak = min(budget - own, graphs[k].plain.peak_bytes)
        times = sum(call.graph == k for call in calls)
        held = min((budget - later) // times, graphs[k].plain.held_bytes)
        if peak <= best[k].peak_bytes and held <= best[k].held_bytes:
            continue
        try:
            more = graphs[k].within(max(peak, best[k].peak_bytes), max(held, best[k].held_bytes))
        except InfeasibleError:
            continue
        tried = [*best[:k], more, *best[k + 1 :]]
        if more.seconds < best[k].seconds and shared_peak(calls, tried, at_end) <= budget:
            best = tried
    return best


def _needed(
    calls: Sequence[GraphCall], plans: Sequence[GraphPlan[PlanType]], graph: int, at_end: int
) -> tuple[int, int]:
    """What is there beside a graph in its calls, and what others need behind its first one.

    What the graph itself holds counts in the former alone.
    """
    held = [0 if k == graph else plan.held_bytes for k, plan in enumerate(plans)]
    own = later = 0
    called = 0
    for call, around, before, peak in _instants(calls, held, plans, at_end):
        if call is not None and call.graph == graph:
            own = max(own, around + before + called * plans[graph].held_bytes)
            called += 1
        elif called:
            later = max(later, around + before + peak)
    return own, later


def _instants(
    calls: Sequence[GraphCall],
    held: Sequence[int],
    plans: Sequence[GraphPlan[PlanType]],
    at_end: int,
) -> Iterator[tuple[GraphCall | None, int, int, int]]:
    """Each call with what is around it, what graphs before it hold, and its peak; then the end of forward."""
    before = 0
    for call in calls:
        yield call, call.around_bytes, before, plans[call.graph].peak_bytes if plans else 0
        before += held[call.graph]
    yield None, at_end, before, 0


def _last_first(calls: Sequence[GraphCall]) -> list[int]:
    """Graphs, the one that is called last first."""
    last = {call.graph: k for k, call in enumerate(calls)}
    return sorted(last, key=lambda graph: -last[graph])


def _seconds(calls: Sequence[GraphCall], plans: Sequence[GraphPlan[PlanType]]) -> float:
    return sum(plans[call.graph].seconds for call in calls)
