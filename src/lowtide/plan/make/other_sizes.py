"""Plans for a step with other sizes: what was decided for one shape is good for others as well.

Two shapes of one function run the same operators on tensors of other sizes. So a Program of one is a Program
of the other, and how much it takes there is simulated. That is quick, where a search is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from lowtide.errors import PlanError
from lowtide.graph import Graph, Op
from lowtide.plan.make.make_plan import plain_peak, plan_with
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan

__all__ = ["alike", "best_of", "program_of", "scaled"]

_METHOD = "as for another shape"


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


def scaled(plan: Plan, graph: Graph) -> Costs:
    """What operators take where tensors have other sizes: as much more as they read and write more bytes.

    Workspaces do not shrink: they are not seen to follow sizes down.
    """
    ratios = [_touched(graph, new) / max(1, _touched(plan.graph, old)) for new, old in _pairs(plan, graph)]
    seconds = tuple(s * r for s, r in zip(plan.seconds, ratios, strict=True))
    spaces = zip(plan.workspace_bytes, ratios, strict=True)
    workspace = tuple(int(size * max(1.0, ratio)) for size, ratio in spaces)
    return Costs(seconds, workspace, "estimated", short={op: s * ratios[op] for op, s in plan.short.items()})


def _pairs(plan: Plan, graph: Graph) -> Iterator[tuple[Op, Op]]:
    return zip(graph.ops, plan.graph.ops, strict=True)


def _touched(graph: Graph, op: Op) -> int:
    return sum(allocated_bytes(graph.tensors[t]) for t in (*op.inputs, *op.outputs))


def program_of(
    plans: Sequence[Plan],
    graph: Graph,
    request: PlanRequest,
    room: DeviceRoom,
    able: Collection[int],
) -> Program | None:
    """A Program that is expected to stay inside the budget: the plain one, or that of another shape."""
    for plan in plans:
        costs = scaled(plan, graph)
        plain = plain_peak(graph, costs, able) + room.outside_bytes
        budget = request.budget.resolve(plain, room.free_bytes) - room.outside_bytes
        for program in (with_in_place(graph, store_all(graph), able), plan.program):
            taken = simulate(graph, program, workspace_bytes=costs.workspace_bytes)
            if taken.peak_bytes <= budget:
                return program
    return None


def best_of(
    plans: Sequence[Plan],
    graph: Graph,
    costs: Costs,
    request: PlanRequest,
    room: DeviceRoom,
    able: Collection[int],
) -> Plan | None:
    """The fastest of these plans for this step; None where none of them stays inside the budget."""
    found: list[Plan] = []
    for plan in plans:
        with contextlib.suppress(PlanError):  # not valid here: operators may run in place there alone
            made = plan_with(graph, costs, plan.program, request, room, able=able, method=_METHOD)
            found += [made] if made is not None else []
    return min(found, key=lambda plan: plan.predicted.seconds, default=None)
