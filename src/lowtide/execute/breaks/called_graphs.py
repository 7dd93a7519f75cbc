"""What is planned where a step has several graphs: which are called, and what is on the device around."""

from __future__ import annotations

import functools

from lowtide.errors import InfeasibleError
from lowtide.execute.breaks.forward_record import ForwardRecord
from lowtide.execute.breaks.graph_plans import held_bytes
from lowtide.execute.breaks.subgraph import Subgraph
from lowtide.plan.make.share_budget import GraphCall, GraphPlan, least_plans, share_budget
from lowtide.plan.result.plan import Plan

__all__ = ["CalledGraphs"]


class CalledGraphs:
    """The graphs of a step that was rehearsed, and what is on the device around them."""

    def __init__(self, record: ForwardRecord) -> None:
        self.called: list[Subgraph] = list(dict.fromkeys(call.graph for call in record.calls))
        self.graphs = [one.plans.shared() for one in self.called if one.plans is not None]
        number = {one: k for k, one in enumerate(self.called)}
        held = {one: held_bytes(one.joint, one.plan.program) for one in self.called if one.joint and one.plan}
        around, self.end = record.around(held)
        pairs = zip(record.calls, around, strict=True)
        self.calls = [GraphCall(number[one.graph], size) for one, size in pairs]

    @property
    def device(self) -> str:
        """The kind of device that the graphs run on."""
        kinds = {one.room.device.type for one in self.called}
        return "cuda" if "cuda" in kinds else "cpu"

    def shared(self, budget: int) -> list[GraphPlan[Plan]] | None:
        """Plans for a budget; None where none fit as far as is known: measured, a step may take less."""
        try:
            return share_budget(self.graphs, self.calls, budget, self.end)
        except InfeasibleError:
            return None

    @functools.cached_property
    def least(self) -> list[GraphPlan[Plan]]:
        """Plans that take as little as could be found."""
        return least_plans(self.graphs, self.calls, self.end)
