"""Plans for a step with other sizes: what was decided for one shape is good for others as well.

Two shapes of one function run the same operators on tensors of other sizes. So a Program of one is a Program
of the other, and how much it takes there is simulated. That is quick, where a search is not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator

from lowtide.errors import PlanError
from lowtide.graph import Graph, Op
from lowtide.plan.make.make_plan import plain_peak, plan_with
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Program, Run
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.request import DeviceRoom, PlanRequest, PlanTask
from lowtide.plan.result.plan import Plan

__all__ = ["AS_FOR_ANOTHER", "alike", "as_good", "plan_by", "scaled"]

AS_FOR_ANOTHER = "as for another shape"
"""The method of a plan that was taken over."""
_MORE, _UNUSED = 0.01, 0.03
"""A plan that was taken over may take so much longer, as a share of the step, and leave so much more of its
budget, as a share of that, and is still as good."""


def alike(one: Graph, other: Graph) -> bool:
    """Whether two steps run the same operators on the same tensors, whatever sizes these have."""
    if len(one.tensors) != len(other.tensors) or len(one.ops) != len(other.ops):
        return False
    ends = [(graph.returned, graph.updated, graph.updated_early) for graph in (one, other)]
    tensors = zip(one.tensors, other.tensors, strict=True)
    same = all((a.role, a.alias, a.dtype) == (b.role, b.alias, b.dtype) for a, b in tensors)
    return same and ends[0] == ends[1] and list(map(_does, one.ops)) == list(map(_does, other.ops))


def _does(op: Op) -> tuple[object, ...]:
    facts = op.kind, op.overload, op.phase, op.inputs, op.outputs, op.updates, op.random, op.once, op.in_place
    return (*facts, op.after, op.shape_only)


def scaled(plan: Plan, graph: Graph, *, shrinking: bool = False) -> Costs:
    """What operators take where tensors have other sizes: as much more as they read and write more bytes.

    Workspaces are ``shrinking`` if asked: they are not seen to follow sizes down.
    """
    ratios = [_touched(graph, new) / max(1, _touched(plan.graph, old)) for new, old in _pairs(plan, graph)]
    seconds = tuple(s * r for s, r in zip(plan.seconds, ratios, strict=True))
    spaces = zip(plan.workspace_bytes, ratios, strict=True)
    least = 0.0 if shrinking else 1.0
    workspace = tuple(int(size * max(least, ratio)) for size, ratio in spaces)
    short, wire = ({op: s * ratios[op] for op, s in some.items()} for some in (plan.short, plan.wire_seconds))
    runs = (line for line in plan.program.instructions if isinstance(line, Run) and line.beside)
    coming = {line.op: math.ceil(line.beside * ratios[line.op]) for line in runs}
    return Costs(seconds, workspace, "estimated", short=short, wire_seconds=wire, on_their_way=coming)


def _pairs(plan: Plan, graph: Graph) -> Iterator[tuple[Op, Op]]:
    return zip(graph.ops, plan.graph.ops, strict=True)


def _touched(graph: Graph, op: Op) -> int:
    return sum(allocated_bytes(graph.tensors[t]) for t in (*op.inputs, *op.outputs))


def plan_by(
    programs: Iterable[Program],
    graph: Graph,
    costs: Costs,
    request: PlanRequest,
    room: DeviceRoom,
    able: Collection[int],
    plain: Program,
) -> Plan | None:
    """The plan by the first of these Programs that stays inside the budget; None where none of them does.

    The ``plain`` one stores everything.
    """
    peak = plain_peak(graph, costs, program=plain) + room.outside_bytes
    budget = request.budget.resolve(peak, room.free_bytes)
    task = PlanTask(request, room, budget, peak, tuple(sorted(able)))
    for program in programs:
        method = "plain" if program == plain else AS_FOR_ANOTHER
        with contextlib.suppress(PlanError):  # not valid here: operators may run in place there alone
            made = plan_with(graph, costs, program, task, method)
            if made is not None:
                return made
    return None


def as_good(plan: Plan, for_another: Plan) -> bool:
    """Whether a plan adds no more, and leaves no more of the budget, than for the shape that it was made for.

    Otherwise a search may find a faster one.
    """
    left = [1 - one.predicted.peak_bytes / max(1, one.budget_bytes) for one in (plan, for_another)]
    return plan.overhead <= for_another.overhead + _MORE and left[0] <= left[1] + _UNUSED
