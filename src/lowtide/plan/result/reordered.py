"""A plan with its instructions in another order: the same decisions, and figures that are true of it."""

from __future__ import annotations

from math import isclose

import msgspec

from lowtide.graph import Phase
from lowtide.plan.check.checker import check
from lowtide.plan.check.time import seconds_of
from lowtide.plan.program.instructions import Program
from lowtide.plan.result.plan import Bound, Plan, Side
from lowtide.plan.result.validate import valid_plan

__all__ = ["reordered"]

_ROUNDING = 1e-6
"""Of a time: sums in another order differ by less, and count as equal."""


def reordered(plan: Plan, program: Program) -> Plan:
    """The plan with this Program; a PlanError names a rule that it breaks, such as that of the budget."""
    found = check(
        plan.graph,
        program,
        workspace_bytes=plan.workspace_bytes,
        offload=plan.offload,
        able=plan.able,
    )
    peak, planned = found.peak_bytes + plan.beside_bytes, plan.predicted.seconds
    if plan.seconds:
        took = seconds_of(plan.graph, program, plan.seconds, plan.short, plan.link, plan.wire_seconds)
        planned = planned if isclose(took, planned, rel_tol=_ROUNDING) else took
    changed = msgspec.structs.replace(
        plan,
        program=program,
        predicted=Side(peak, planned),
        smallest_budget_bytes=min(plan.smallest_budget_bytes, peak),
    )
    return valid_plan(changed if planned == plan.predicted.seconds else _with_ratios(changed, plan))


def _with_ratios(plan: Plan, before: Plan) -> Plan:
    """With overheads and a gap that follow from its time."""
    planned, plain, base = plan.predicted.seconds, plan.plain.seconds, _base(before)
    bound = min(plan.bound.seconds, planned)
    gap = (planned - bound) / planned if planned else 0.0
    return msgspec.structs.replace(
        plan,
        overhead=(planned - plain) / base,
        bound=Bound(bound, (bound - plain) / base, plan.bound.holds_for),
        gap=gap if gap > _ROUNDING else 0.0,
    )


def _base(plan: Plan) -> float:
    """What the overheads of a plan are told against: the plain step, or its forward."""
    plain = plan.plain.seconds
    ops = enumerate(plan.graph.ops)
    forward = sum(plan.seconds[k] for k, op in ops if op.phase is Phase.FORWARD)
    over = plan.predicted.seconds - plain
    if isclose(plan.overhead * plain, over, rel_tol=_ROUNDING, abs_tol=_ROUNDING * plain):
        return plain or 1.0
    return forward or 1.0
