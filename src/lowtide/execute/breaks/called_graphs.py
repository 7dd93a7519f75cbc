"""What is planned where a step has several graphs: which are called, and what is on the device around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.errors import InfeasibleError
from lowtide.execute.breaks.forward_record import ForwardRecord
from lowtide.execute.breaks.graph_plans import as_planned
from lowtide.execute.breaks.subgraph import Subgraph
from lowtide.plan.make.share_budget import (
    CallSequence,
    GraphCall,
    GraphPlan,
    least_plans,
    share_budget,
    shared_peak,
)
from lowtide.plan.result.plan import Plan
from lowtide.units import format_bytes

__all__ = ["CalledGraphs", "PassedIn", "PlannedCalls", "calls_in_another_order", "recorded_calls"]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedCalls:
    """The calls of a rehearsal, with what is on the device around each, and what they may take together."""

    graphs: Sequence[Subgraph]
    around: Sequence[int]
    end: int
    limit: int = 0

    @property
    def taken_bytes(self) -> int:
        """The peak by the plans that the graphs have now."""
        number = {one: k for k, one in enumerate(dict.fromkeys(self.graphs))}
        taken = [one.taken() for one in number]
        plans = [GraphPlan(one.peak, one.held, 0.0, None) for one in taken]
        return shared_peak([self.sequence(number)], plans)

    def sequence(self, number: Mapping[Subgraph, int]) -> CallSequence:
        """The calls of graphs that have these numbers."""
        pairs = zip(self.graphs, self.around, strict=True)
        return CallSequence([GraphCall(number[one], size) for one, size in pairs], self.end)


@dataclass(frozen=True, slots=True)
class PassedIn:
    """What was given to a graph in a call."""

    parameters: Mapping[int, int]
    """Storages of parameters, with their bytes."""
    trained: Mapping[int, int]
    """Storages of leaves that get a gradient."""
    fresh: int
    """Bytes of what the code between graphs has made, and no graph before was given."""


def recorded_calls(record: ForwardRecord) -> PlannedCalls:
    """The calls that were noted."""
    graphs: list[Subgraph] = [call.graph for call in record.calls]
    around, end = record.around({one: one.taken().held for one in graphs})
    return PlannedCalls(graphs, around, end)


def calls_in_another_order(
    graphs: Sequence[Subgraph], passed: Sequence[PassedIn], outside: int
) -> PlannedCalls:
    """Calls of which it was noted what goes into each, with what is on the device around each at most.

    ``outside`` is there all the time. All that has gone in and come out stays.
    """
    there, around, behind = outside, list[int](), list[int]()
    trained: dict[int, int] = {}
    for one in reversed(passed):
        behind.insert(0, sum(trained.values()))  # these gradients are there while its backward runs
        trained |= one.trained
    for graph, one, gradients in zip(graphs, passed, behind, strict=True):
        taken = graph.taken()
        there += one.fresh
        around.append(there - taken.given + taken.gradients + gradients)
        there += taken.made
    return PlannedCalls(graphs, around, there)


class CalledGraphs:
    """The graphs that are called in a step, and what is on the device around them.

    Some of them may be in calls before as well. Graphs that are called only there keep their plans.
    """

    def __init__(self, now: PlannedCalls, before: Sequence[PlannedCalls] = ()) -> None:
        self.now, self.before = now, before
        self.called = list(dict.fromkeys(now.graphs))
        free = [(one, one.plans) for one in self.called if one.plans is not None]
        self.free = [one for one, _ in free]
        """Those that may get other plans."""
        others = dict.fromkeys(one for calls in (now, *before) for one in calls.graphs)
        kept = [one for one in others if one not in self.free]
        self.graphs = [plans.shared() for _, plans in free]
        self.graphs += [as_planned(one.joint, one.plan) for one in kept if one.joint and one.plan]
        self._number = {one: k for k, one in enumerate((*self.free, *kept))}

    def _sequences(self, limit: int) -> list[CallSequence]:
        """All calls, as if those before might take just as much as these."""
        before = [calls.sequence(self._number).with_more(limit - calls.limit) for calls in self.before]
        return [self.now.sequence(self._number), *before]

    @property
    def device(self) -> str:
        """The kind of device that the graphs run on."""
        kinds = {one.room.device.type for one in self.called}
        return "cuda" if "cuda" in kinds else "cpu"

    def outside_bytes(self, least: int) -> int:
        """What is on the device in these calls besides what graphs are given, make and hold."""
        made = 0
        for one, around in zip(self.now.graphs, self.now.around, strict=True):
            taken = one.taken()
            least = max(least, around - made + taken.given)
            made += taken.made
        return max(least, self.now.end - made)

    @property
    def plain_bytes(self) -> int:
        """The peak of the calls where nothing is recomputed."""
        return self.peak_bytes([graph.plain for graph in self.graphs])

    def peak_bytes(self, plans: Sequence[GraphPlan[Plan]]) -> int:
        """The peak of the calls by these plans."""
        return shared_peak([self.now.sequence(self._number)], plans)

    def shared(self, limit: int) -> list[GraphPlan[Plan]]:
        """Plans by which the calls take so much at most. An InfeasibleError names what works."""
        return share_budget(self.graphs, self._sequences(limit), limit)

    def refused(self, budget: int, works: int, python: int) -> InfeasibleError:
        """No plan fits; what ``works`` was measured, with what ``python`` code holds for its backward."""
        told = (
            f". Code that torch did not capture holds {format_bytes(python)} of it for its backward"
            if python
            else ""
        )
        return InfeasibleError(
            f"no plan fits {format_bytes(budget)} ({budget} bytes) for the {len(self.called)} graphs of this "
            f"step; the smallest budget with a known plan is {format_bytes(works)} ({works} bytes){told}. "
            "Give that, or take a smaller batch; a step without graph breaks may need less (fullgraph=True "
            "names the first break)",
            budget=budget,
            smallest_budget=works,
            floor=0,
            holds_for="nothing",
        )

    def least(self, limit: int) -> list[GraphPlan[Plan]]:
        """Plans that take as little as could be found: measured, the calls may take less than this says.

        An InfeasibleError: the calls before would take more than they may.
        """
        found = least_plans(self.graphs, self._sequences(limit))
        for calls in self.before:
            taken = shared_peak([calls.sequence(self._number)], found)
            if taken > calls.limit:
                raise InfeasibleError(
                    "graphs that were planned before would take more than their budget",
                    budget=calls.limit,
                    smallest_budget=taken,
                    floor=0,
                    holds_for="nothing",
                )
        return found
