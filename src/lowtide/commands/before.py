"""The step as eager PyTorch runs it, for files about plans whose operators are others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.graph import GROUP, Graph
from lowtide.needs import needs_torch
from lowtide.plan.program.instructions import Loop
from lowtide.plan.result.plan import Plan

if TYPE_CHECKING:
    from lowtide.zoo import Built

__all__ = ["graph_before"]


def graph_before(built: Built, plan: Plan | None) -> Graph | None:
    """The graph of the step itself, where the plan has tiles or groups, which are new operators."""
    if plan is None or not _has_other_operators(plan):
        return None
    with needs_torch("capturing a step"):
        from lowtide.trace.step.capture import capture
    return capture(built.loss, built.model, *built.batch).step.graph


def _has_other_operators(plan: Plan) -> bool:
    tiled = any(isinstance(line, Loop) for line in plan.program.instructions)
    return tiled or any(op.kind == GROUP for op in plan.graph.ops)
