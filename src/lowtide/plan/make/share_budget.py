"""One budget for a step in several graphs: how much of it each graph may take.

Forward runs the graphs one after the other, backward the other way round. While one of them runs, those
before it hold what their backward needs. So a graph that holds more leaves less to all behind it:

    around + what graphs before it hold + its own peak <= budget        for every call of a graph

A step may have several sequences of calls, one for each way through its branches. Each has to fit.

Every graph may hold the same share of what it can: from the least that it has a plan for to what it holds
where nothing is recomputed. Its peak may be what the others leave. Several shares are tried. Then, from the
last graph to the first, each takes what is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lowtide.errors import InfeasibleError
from lowtide.units import format_bytes

__all__ = [
    "CallSequence",
    "GraphCall",
    "GraphPlan",
    "SharedGraph",
    "least_plans",
    "only_plan",
    "share_budget",
    "shared_peak",
]

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


@dataclass(frozen=True, slots=True)
class CallSequence:
    """The calls of one forward."""

    calls: Sequence[GraphCall]
    end_bytes: int = 0
    """What is on the device when forward ends, besides what graphs hold."""

    def count(self, graph: int) -> int:
        """How many times a graph is called."""
        return sum(call.graph == graph for call in self.calls)

    def with_more(self, size: int) -> CallSequence:
        """The same where so much more is on the device all the time."""
        calls = [replace(call, around_bytes=call.around_bytes + size) for call in self.calls]
        return CallSequence(calls, self.end_bytes + size)


def only_plan(plan: GraphPlan[PlanType], passing_bytes: int) -> SharedGraph[PlanType]:
    """A graph that runs by this plan and no other."""

    def within(peak: int, held: int) -> GraphPlan[PlanType]:
        if plan.peak_bytes <= peak and plan.held_bytes <= held:
            return plan
        raise InfeasibleError(
            "a graph that is not planned again takes more", budget=peak, smallest_budget=peak, floor=0
        )

    return SharedGraph(plan, passing_bytes, within, lambda _: plan)


def shared_peak(sequences: Sequence[CallSequence], plans: Sequence[GraphPlan[PlanType]]) -> int:
    """The peak of the step by these plans."""
    held = [plan.held_bytes for plan in plans]
    return max(
        around + before + peak
        for sequence in sequences
        for _, around, before, peak in _instants(sequence, held, plans)
    )


def share_budget(
    graphs: Sequence[SharedGraph[PlanType]], sequences: Sequence[CallSequence], budget: int
) -> list[GraphPlan[PlanType]]:
    """A plan for each graph, so that every sequence of calls stays inside the budget.

    An InfeasibleError names a budget that works.
    """
    plain = [graph.plain for graph in graphs]
    if shared_peak(sequences, plain) <= budget:
        return plain
    best: list[GraphPlan[PlanType]] | None = None
    worse = 0
    for share in _SHARES:
        found = _at(graphs, sequences, budget, share)
        if found is None:
            continue
        if best is None or _seconds(sequences, found) < _seconds(sequences, best):
            best, worse = found, 0
        else:
            worse += 1
        if worse >= _WORSE:
            break
    if best is None:
        best = least_plans(graphs, sequences)
        smallest = shared_peak(sequences, best)
        if smallest > budget:
            raise InfeasibleError(
                f"no plan fits {format_bytes(budget)} ({budget} bytes) for the {len(graphs)} graphs of this "
                f"step; the smallest budget with a known plan is {format_bytes(smallest)} ({smallest} "
                "bytes). Give that, or take a smaller batch",
                budget=budget,
                smallest_budget=smallest,
                floor=0,
                holds_for="nothing",
            )
    return _with_what_is_left(graphs, sequences, best, budget)


def least_plans(
    graphs: Sequence[SharedGraph[PlanType]], sequences: Sequence[CallSequence]
) -> list[GraphPlan[PlanType]]:
    """A plan for each graph, so that the step takes as little as could be found."""

    def takes(plans: Sequence[GraphPlan[PlanType]]) -> tuple[int, int]:
        held = [sum(plans[call.graph].held_bytes for call in one.calls) for one in sequences]
        return shared_peak(sequences, plans), sum(held)

    found = []
    for best in ([graph.least(0) for graph in graphs], [graph.leanest for graph in graphs]):
        for _ in range(_SWEEPS):
            for k in _last_first(sequences):
                own, later = _needed(sequences, best, k)
                for others in graphs[k].needs(later - own):
                    tried = [*best[:k], graphs[k].least(others), *best[k + 1 :]]
                    best = min(best, tried, key=takes)
        found.append(best)
    return min(found, key=takes)


def _at(
    graphs: Sequence[SharedGraph[PlanType]], sequences: Sequence[CallSequence], budget: int, share: float
) -> list[GraphPlan[PlanType]] | None:
    """Plans that hold such a share; None where they do not fit."""
    held = [
        least + int(share * max(0, graph.plain.held_bytes - least))
        for graph, least in ((graph, graph.leanest.held_bytes) for graph in graphs)
    ]
    for last in {one.calls[-1].graph for one in sequences if one.calls}:  # nobody comes behind the last one
        found_in = [one for one in sequences if one.count(last)]
        if all(one.calls[-1].graph == last and one.count(last) == 1 for one in found_in):
            others = [one.end_bytes + sum(held[call.graph] for call in one.calls[:-1]) for one in found_in]
            held[last] = max(0, budget - max(others))
    allowed = [graph.plain.peak_bytes for graph in graphs]
    for one in sequences:
        for call, around, before, _ in _instants(one, held, ()):
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
    return found if shared_peak(sequences, found) <= budget else None


def _with_what_is_left(
    graphs: Sequence[SharedGraph[PlanType]],
    sequences: Sequence[CallSequence],
    plans: list[GraphPlan[PlanType]],
    budget: int,
) -> list[GraphPlan[PlanType]]:
    """From the last graph to the first, each with what the others leave."""
    best = plans
    for k in _last_first(sequences):
        own, later = _needed(sequences, best, k)
        peak = min(budget - own, graphs[k].plain.peak_bytes)
        times = max(one.count(k) for one in sequences)
        held = min((budget - later) // times, graphs[k].plain.held_bytes)
        if peak <= best[k].peak_bytes and held <= best[k].held_bytes:
            continue
        try:
            more = graphs[k].within(max(peak, best[k].peak_bytes), max(held, best[k].held_bytes))
        except InfeasibleError:
            continue
        tried = [*best[:k], more, *best[k + 1 :]]
        if more.seconds < best[k].seconds and shared_peak(sequences, tried) <= budget:
            best = tried
    return best


def _needed(
    sequences: Sequence[CallSequence], plans: Sequence[GraphPlan[PlanType]], graph: int
) -> tuple[int, int]:
    """What is there beside a graph in its calls, and what others need behind its first one.

    What the graph itself holds counts in the former alone.
    """
    held = [0 if k == graph else plan.held_bytes for k, plan in enumerate(plans)]
    own = later = 0
    for one in sequences:
        called = 0
        for call, around, before, peak in _instants(one, held, plans):
            if call is not None and call.graph == graph:
                own = max(own, around + before + called * plans[graph].held_bytes)
                called += 1
            elif called:
                later = max(later, around + before + peak)
    return own, later


def _instants(
    sequence: CallSequence, held: Sequence[int], plans: Sequence[GraphPlan[PlanType]]
) -> Iterator[tuple[GraphCall | None, int, int, int]]:
    """Each call with what is around it, what graphs before it hold, and its peak; then the end of forward."""
    before = 0
    for call in sequence.calls:
        yield call, call.around_bytes, before, plans[call.graph].peak_bytes if plans else 0
        before += held[call.graph]
    yield None, sequence.end_bytes, before, 0


def _last_first(sequences: Sequence[CallSequence]) -> list[int]:
    """Graphs, the one that is called last first."""
    last: dict[int, int] = {}
    for one in sequences:
        for k, call in enumerate(one.calls):
            last[call.graph] = max(last.get(call.graph, 0), k)
    return sorted(last, key=lambda graph: -last[graph])


def _seconds(sequences: Sequence[CallSequence], plans: Sequence[GraphPlan[PlanType]]) -> float:
    return sum(plans[call.graph].seconds for one in sequences for call in one.calls)
