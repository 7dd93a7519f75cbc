"""The step as eager PyTorch runs it, for files about plans whose operators are others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from lowtide.graph import GROUP
from lowtide.needs import needs_torch
from lowtide.plan.program.instructions import Loop
from lowtide.plan.result.plan import Plan

if TYPE_CHECKING:
    from lowtide.zoo import Built

__all__ = ["with_step_before"]


def with_step_before(built: Built, plan: Plan) -> Plan:
    """The plan with the step itself and its costs, where it has tiles or groups, which are new operators.

    Costs are left out where they are not known: of a step that fits nowhere as a whole.
    """
    if not _has_other_operators(plan):
        return plan
    with needs_torch("capturing a step"):
        from lowtide.execute.planning.step_costs import costs_of, device_of, known_costs
        from lowtide.trace.step.capture import capture
    graph = capture(built.loss, built.model, *built.batch).step.graph
    if plan.cost == "measured":
        costs = known_costs(graph)
    else:
        costs = costs_of(graph, (), device_of(graph), None, plan.cost)
    plan = replace(plan, plain_graph=graph)
    if costs is None:
        return plan
    return replace(plan, plain_seconds=costs.seconds, plain_workspace_bytes=costs.workspace_bytes)


def _has_other_operators(plan: Plan) -> bool:
    tiled = any(isinstance(line, Loop) for line in plan.program.instructions)
    return tiled or any(op.kind == GROUP for op in plan.graph.ops)
