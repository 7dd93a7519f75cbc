"""A step with a pause between its forward and its backward, in which others need memory.

One of several graphs waits for its backward while those behind it run. The pause is an operator that does
nothing, at the end of forward, and takes as many bytes as they need: what is held there must leave room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from lowtide.graph import Graph, Op, Phase
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import plain_peak, plan_with
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Instruction, Program, Run
from lowtide.plan.request import DeviceRoom, PlanRequest, PlanTask
from lowtide.plan.result.plan import Plan

__all__ = ["PausedStep", "resumed"]


@dataclass(frozen=True, slots=True)
class PausedStep:
    """The step with a pause."""

    graph: Graph
    costs: Costs
    able: frozenset[int]
    place: int
    """Which operator is the pause."""

    @classmethod
    def of(cls, graph: Graph, costs: Costs, able: Collection[int], others_bytes: int) -> PausedStep:
        """A step, in whose pause others need so many bytes."""
        place = sum(op.phase is Phase.FORWARD for op in graph.ops)
        device = graph.ops[0].device if graph.ops else ""
        pause = Op(
            id="pause",
            kind="lowtide.pause",
            name=f"others need {others_bytes} bytes",  # plans that are kept are told apart by their graph
            after=tuple(range(place)),
            device=device,
            once=True,
        )

        def moved(op: Op) -> Op:
            if not op.after:
                return op
            return msgspec.structs.replace(op, after=tuple(k + (k >= place) for k in op.after))

        ops = [moved(op) for op in graph.ops]
        ops.insert(place, pause)
        seconds, workspace = list(costs.seconds), list(costs.workspace_bytes or [0] * len(graph.ops))
        seconds.insert(place, 0.0)
        workspace.insert(place, others_bytes)
        return cls(
            msgspec.structs.replace(graph, ops=tuple(ops)),
            replace(
                costs,
                seconds=tuple(seconds),
                workspace_bytes=tuple(workspace),
                short={k + (k >= place): one for k, one in costs.short.items()},
                wire_seconds={k + (k >= place): one for k, one in costs.wire_seconds.items()},
                on_their_way={k + (k >= place): one for k, one in costs.on_their_way.items()},
            ),
            frozenset(k + (k >= place) for k in able),
            place,
        )

    def figures(
        self,
        seconds: Sequence[float],
        workspace: Sequence[int],
        short: Mapping[int, float],
        able: Sequence[int],
        wire_seconds: Mapping[int, float] | None = None,
    ) -> tuple[Costs, frozenset[int]]:
        """Figures of the step itself, from those of the step with the pause: costs, and who runs in place."""
        place = self.place
        return (
            Costs(
                (*seconds[:place], *seconds[place + 1 :]),
                (*workspace[:place], *workspace[place + 1 :]),
                short={k - (k > place): one for k, one in short.items()},
                wire_seconds={k - (k > place): one for k, one in (wire_seconds or {}).items()},
            ),
            frozenset(k - (k > place) for k in able),
        )

    def without(self, program: Program) -> Program:
        """The Program of the step itself."""

        def lines(found: Collection[Instruction]) -> tuple[Instruction, ...]:
            return tuple(
                msgspec.structs.replace(line, op=line.op - (line.op > self.place))
                if isinstance(line, Run)
                else line
                for line in found
                if not (isinstance(line, Run) and line.op == self.place)
            )

        return msgspec.structs.replace(
            program, forward=lines(program.forward), backward=lines(program.backward)
        )


def resumed(plan: Plan, paused: PausedStep, request: PlanRequest, step: Graph) -> Plan:
    """The plan for a step itself, from one with a pause; by the figures of that plan."""
    room = DeviceRoom(plan.beside_bytes, link=plan.link)
    costs, able = paused.figures(plan.seconds, plan.workspace_bytes, plan.short, plan.able, plan.wire_seconds)
    costs = replace(costs, origin=plan.cost, disturbed=plan.disturbed)
    plain = plain_peak(step, costs, able) + room.outside_bytes
    asked = replace(request, budget=Budget(bytes=plan.budget_bytes))
    task = PlanTask(asked, room, plan.budget_bytes, plain, tuple(sorted(able)))
    found = plan_with(step, costs, paused.without(plan.program), task, plan.method)
    assert found is not None
    return found
