"""From a captured step to a Plan: costs, what the device holds, plans that were made before."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from lowtide.cost.watch import Marker
from lowtide.cost.wire import wire_seconds
from lowtide.errors import InfeasibleError, LowtideError
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.host import fits_host, refuse_too_much
from lowtide.execute.memory.optimizer_state import with_state
from lowtide.execute.planning.kept import Kept
from lowtide.execute.planning.other_shapes import NO_OTHERS, OtherShapes
from lowtide.execute.planning.step_costs import MEASURING, costs_of, device_of, link_for
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.graph import Graph, Phase
from lowtide.plan import time_shares
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import make_plan, plain_peak
from lowtide.plan.make.other_sizes import AS_FOR_ANOTHER, as_good, plan_by, scaled
from lowtide.plan.make.paused import PausedStep, resumed
from lowtide.plan.make.retimed import retimed
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.recompute.found import LOWEST
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.distributed.wires import wire_ends
from lowtide.trace.step.joint import Joint

__all__ = ["StepPlanner", "measurable", "warn_interrupted"]

_MEASURED_SHARE = 0.8
"""Of the free memory: what measuring may take where the plain step does not fit."""
_QUICK = 0.5
"""Seconds of a search for a new shape, if that is enough: it ends sooner where nothing is left to gain."""


def warn_interrupted() -> None:
    """Tell that Ctrl-C has ended a search, where there is a plan all the same."""
    warnings.warn("the search was interrupted: the step runs by the best plan so far", stacklevel=3)


class StepPlanner:
    """Plans one captured step: first what to measure it with, then how to run it."""

    def __init__(
        self,
        joint: Joint,
        room: Room,
        *,
        state: Sequence[Any] = (),
        pinned: Collection[int] = (),
        others: OtherShapes = NO_OTHERS,
    ) -> None:
        """``state`` is that of the optimiser; ``pinned`` are leaves that cannot leave.

        Plans for ``others`` shapes of the step make it quick: one of them is taken over.
        """
        self.joint, self._room, self._pinned = joint, room, pinned
        self._graph = with_state(joint.graph, state)
        self._planned, self._settled = others.planned, others.settled(self._graph)
        self._device = device_of(joint.graph)
        self._able = able_in_place(joint)
        self._targets = [call.target for call in joint.calls]
        self._relatives = others.of(self._graph)
        self.known: Plan | None = None
        """A plan that was made before, once it was looked for."""
        self._known_beside = 0
        """What was left alone for graphs of the step then."""
        self._expected: Plan | None = None
        """A plan by what is known of other shapes, which the step is measured with."""
        self.measured: tuple[Graph, Costs] | None = None
        """The step with the state of an optimiser, and what its operators take, once it was planned."""
        self.moves_leaves = False
        """Whether leaves may leave the device then."""

    @property
    def familiar(self) -> bool:
        """Whether plans for other shapes are known."""
        return bool(self._relatives)

    @property
    def outside_bytes(self) -> int:
        """What is on the device outside the step."""
        return self._room.outside_bytes()

    @cached_property
    def _plain(self) -> Program:
        return with_in_place(self._graph, store_all(self._graph), self._able)

    def to_measure(self, request: PlanRequest) -> Program | None:
        """The Program to measure the step with; where it has run with other shapes, one inside the budget.

        The user trains then, and no new shape may take more than is allowed, nor another way through
        branches. None where none is known to fit. A plan that was made before needs nothing measured.
        """
        request, room = self._asked(request), self._there(request, None)
        known = self._kept(request, room).load()
        if known is not None and fits_host(self._graph, known.program):
            now = wire_seconds(self._graph, wire_ends())
            self.known, self._known_beside = retimed(known, now), self._room.graph_bytes
            return known.program
        if self._relatives:
            self._expected = self._taken_over(request, room)
            return None if self._expected is None else self._expected.program
        graph, limit = self.joint.graph, None
        if self._planned:
            plain = plain_peak(self._graph, Costs(()), program=self._plain) + room.outside_bytes
            limit = request.budget.resolve(plain, room.free_bytes)
        seconds = time_shares.MEASURING * request.limits.time_limit
        return measurable(graph, self._targets, self._device, self._room, limit, seconds=seconds)

    def plan(
        self, run: Callable[[Marker], object] | None, request: PlanRequest, *, smallest: bool = False
    ) -> Plan:
        """The plan for the step; ``run`` runs it once with a marker, to measure what is not known.

        With ``smallest`` it is the plan with the smallest peak, the same whenever it is asked for.
        """
        request, graph, able = self._asked(request), self._graph, self._able
        if self.known is not None and self._room.graph_bytes == self._known_beside and not smallest:
            refuse_too_much(graph, self.known.program)
            return self.known
        began = time.monotonic()
        costs = self._costs(run, request)
        self.measured, self.moves_leaves = (graph, costs), bool(request.offload)
        # after all that was measured: libraries have taken what they keep
        room = self._there(request, self._link(request))
        paused: PausedStep | None = None
        if self._room.between_bytes:
            paused = PausedStep.of(graph, costs, able, self._room.between_bytes)
            graph, costs, able = paused.graph, paused.costs, paused.able
        kept = Kept(graph, able, request, self._device, room)
        plan = kept.load_first() if smallest else kept.load()
        optional = request.auto and not request.offload  # nobody has asked for offload
        limit = request.limits.time_limit
        left = max((1 - time_shares.MEASURING) * limit, limit - (time.monotonic() - began))

        def tried(asked: PlanRequest) -> Plan:
            place = replace(room, link=self._link(asked))
            try:
                return make_plan(graph, costs, asked.within(left), place, able=able)
            except InfeasibleError as error:
                return kept.first(error) if smallest else kept.smallest(error)

        if plan is None and self._expected is not None:
            plan = self._as_expected(self._expected, costs, request, room)
            if plan is not None and not plan.interrupted:
                kept.store(plan)
        if plan is None or (optional and not fits_host(graph, plan.program)):
            plan = tried(request)
            if optional and not fits_host(graph, plan.program):
                plan = tried(request.without("offload"))
            if plan.interrupted:
                warn_interrupted()
            elif not smallest:
                kept.store(plan)
        refuse_too_much(graph, plan.program)
        plan = retimed(plan, costs.wire_seconds)  # it may have been kept since others were as fast
        return plan if paused is None else resumed(plan, paused, request, self._graph)

    def _taken_over(self, request: PlanRequest, room: DeviceRoom) -> Plan | None:
        """A plan from what is known of other shapes: the plain one, one of theirs, or what a search finds.

        It is searched for where none of theirs fits, or where they may be improved on.
        """
        graph, first, able = self._graph, self._relatives[0], self._able
        costs, least = scaled(first, graph), scaled(first, graph, shrinking=True)
        plain = plain_peak(graph, least, program=self._plain) + room.outside_bytes
        budget = Budget(bytes=request.budget.resolve(plain, room.free_bytes))
        asked = replace(request, budget=budget).without("tile")
        programs = [self._plain, *(plan.program for plan in self._relatives)]
        found = plan_by(programs, graph, costs, asked, room, able, self._plain)
        if found is not None and not self._may_improve(found):
            return found
        searched = self._searched(costs, asked, room, needed=found is None)
        if found is None or (searched is not None and searched.predicted.seconds < found.predicted.seconds):
            return searched
        return found

    def _searched(self, costs: Costs, request: PlanRequest, room: DeviceRoom, *, needed: bool) -> Plan | None:
        """What a short search finds; or a longer one, where a plan is ``needed`` and that was too short."""
        limit = request.limits.time_limit
        plan: Plan | None = None
        for seconds in sorted({min(_QUICK, limit), limit if needed else min(_QUICK, limit)}):
            with contextlib.suppress(InfeasibleError):
                plan = make_plan(self._graph, costs, request.within(seconds), room, able=self._able)
                if plan.method != LOWEST or plan.interrupted:
                    break
        return plan

    def _may_improve(self, plan: Plan) -> bool:
        """Whether a search may find a faster plan than this one."""
        if plan.method != AS_FOR_ANOTHER or self._settled:
            return False
        return not as_good(plan, next(one for one in self._relatives if one.program == plan.program))

    def _as_expected(
        self, expected: Plan, costs: Costs, request: PlanRequest, room: DeviceRoom
    ) -> Plan | None:
        """The plan that was expected to fit, now that workspaces are measured; None where it does not."""
        asked, programs = request.without("tile"), [expected.program]
        plan = plan_by(programs, self._graph, costs, asked, room, self._able, self._plain)
        if plan is None or not fits_host(self._graph, plan.program):
            return None
        return msgspec.structs.replace(
            plan,
            method=expected.method,
            interrupted=expected.interrupted,
            solve_seconds=expected.solve_seconds,
        )

    def _costs(self, run: Callable[[Marker], object] | None, request: PlanRequest) -> Costs:
        """What operators take; of a step that has run with other shapes, workspaces alone are measured."""
        graph = self.joint.graph
        limit = min(MEASURING, time_shares.MEASURING * request.limits.time_limit)
        limit = 0.0 if self._relatives else limit
        costs = costs_of(graph, self._targets, self._device, run, request.cost, limit)
        if self._relatives and costs.origin == "measured":
            known = scaled(self._relatives[0], self._graph)
            costs = replace(costs, seconds=known.seconds, short=known.short, origin=known.origin)
        return costs

    def _asked(self, request: PlanRequest) -> PlanRequest:
        """The request; a share is one of a training step, evaluation keeps nothing for backward as it is."""
        trains = any(op.phase is not Phase.FORWARD for op in self.joint.graph.ops)
        evaluates = request.budget.share is not None and not trains
        return replace(request, budget=Budget(share=1.0)) if evaluates else request

    def _link(self, request: PlanRequest) -> Link | None:
        return link_for(request, self._device, graphs=self._room.graph_bytes > 0)

    def _there(self, request: PlanRequest, link: Link | None) -> DeviceRoom:
        free = self._room.free_bytes() if request.budget.auto else None
        return DeviceRoom(self._room.outside_bytes(), free, link, self._pinned)

    def _kept(self, request: PlanRequest, room: DeviceRoom) -> Kept:
        return Kept(self._graph, self._able, request, self._device, room)


def measurable(
    graph: Graph,
    targets: Sequence[Any],
    kind: str,
    room: Room,
    limit: int | None = None,
    *,
    seconds: float | None = None,
) -> Program | None:
    """A Program to measure a step with: the plain one where it fits, else one planned with estimates.

    It fits into the device, or into ``limit`` bytes of it; it is searched for so many ``seconds`` at most.
    """
    plain = store_all(graph)
    free, outside = int(room.free_bytes() * _MEASURED_SHARE), room.outside_bytes()
    free = free if limit is None else min(free, limit)
    if simulate(graph, plain).peak_bytes + outside <= free:
        return plain
    costs = costs_of(graph, targets, kind, None, "estimated")
    with contextlib.suppress(LowtideError):
        asked = PlanRequest(Budget(bytes=free))
        asked = asked if seconds is None else asked.within(min(seconds, asked.limits.time_limit))
        first = make_plan(graph, costs, asked, DeviceRoom(outside))
        if first.interrupted:
            raise KeyboardInterrupt  # there is no plan for the user's budget yet
        return first.program
    return None
