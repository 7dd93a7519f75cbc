"""Says whether a plan from a file contradicts itself, before anything relies on its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.errors import PlanError
from lowtide.graph import Graph, check_attributes, validate
from lowtide.plan.leaves import MOVABLE
from lowtide.plan.plan import Plan
from lowtide.plan.program import Program

__all__ = ["valid_plan", "valid_program"]

_MOST = 1 << 63
"""No figure is that large."""


def valid_plan(plan: Plan) -> Plan:
    """The plan itself, or a PlanError (for its graph a GraphError) that names the first contradiction."""
    _refuse(_problems(plan), "plan")
    return plan


def valid_program(program: Program) -> Program:
    """The program itself, or such an error about the steps of its tiles."""
    _refuse(_bodies(program), "program")
    return program


def _refuse(problems: Iterator[str], what: str) -> None:
    for problem in problems:
        raise PlanError(f"{problem}: the {what} is damaged, or was written by another version; plan again")


def _problems(plan: Plan) -> Iterator[str]:
    for name in ("budget_bytes", "beside_bytes", "resident_bytes", "smallest_budget_bytes", "disturbed"):
        if not _amount(getattr(plan, name)):
            yield f"{name} is no amount"
    yield from _figures(plan.graph, plan.workspace_bytes, plan.seconds)
    ops = len(plan.graph.ops)
    for k in (*plan.able, *plan.short):
        if not 0 <= k < ops:
            yield f"it names operator {k}; the step has {ops}"
    if not all(_amount(seconds) for seconds in plan.short.values()):
        yield "a short run takes less than no time, or forever"
    for word in plan.offload:
        if word not in MOVABLE:
            yield f"it lets {word!r} leave the device; {' and '.join(MOVABLE)} may"
    yield from _bodies(plan.program)


def _bodies(program: Program) -> Iterator[str]:
    for body in program.bodies:
        yield from _figures(body.graph, body.workspace_bytes, body.seconds)
        yield from _bodies(body.program)


def _figures(graph: Graph, workspace: Sequence[int], seconds: Sequence[float]) -> Iterator[str]:
    """What is wrong with a graph and with the figures of its operators."""
    check_attributes(validate(graph))
    for what, figures in (("workspaces", workspace), ("times", seconds)):
        if figures and len(figures) != len(graph.ops):
            yield f"it has {len(figures)} {what} for {len(graph.ops)} operators"
        if not all(map(_amount, figures)):
            yield f"one of its {what} is no amount"


def _amount(figure: float) -> bool:
    return 0 <= figure < _MOST
