"""One graph of a step that torch captures in several."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.cost.modes import Modes
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.breaks.alike import plan_of_one_like
from lowtide.execute.breaks.boundary import with_uses_apart
from lowtide.execute.breaks.forward_record import has_storage
from lowtide.execute.breaks.graph_plans import (
    Alone,
    GraphBytes,
    GraphPlans,
    given_bytes,
    graph_bytes,
    zeros_for,
)
from lowtide.execute.breaks.late import with_late_gradients
from lowtide.execute.breaks.together import Together
from lowtide.execute.compile.aot import Programs, Watch
from lowtide.execute.compile.family import Family
from lowtide.execute.compile.planned import Planned
from lowtide.execute.compile.sharded import refuse_distributed_parts
from lowtide.execute.compile.trial import Rehearsal, no_trace
from lowtide.execute.compile.verify import Verification
from lowtide.execute.memory.device import Room
from lowtide.execute.planning.plan_step import StepPlanner
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.runtime.parameter_offload import pinned_leaves
from lowtide.execute.runtime.witness import Witness
from lowtide.execute.tiling.plan_tiles import has_loop, in_tiles
from lowtide.plan.budget import Budget
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simple import store_all
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.eager.gradients import is_dense
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.step.boundary import Arriving, Boundary, silenced
from lowtide.trace.step.joint import Joint, Leaf

__all__ = ["Subgraph"]

_SEARCHES = 8
"""A graph is planned about so many times: its time for one is that part of the time limit."""
_TILES = 0.5
"""The part of the time limit for one search for tiles."""
_SHORTEST = 0.2
"""Seconds for one search at least."""


class Subgraph(Planned):
    """One graph of a step."""

    may_split = False

    def __init__(
        self,
        module: fx.GraphModule,
        leaves: Sequence[Leaf],
        layouts: Layouts,
        together: Together,
        family: Family | None = None,
    ) -> None:
        """``family`` counts the graphs of one function."""
        super().__init__(module, leaves, layouts, together.request, None, Rehearsal())
        self.together, self._counted = together, family
        self.joint: Joint | None = None
        self.plan: Plan | None = None
        self.arguments: list[Any] = []
        """Those of the rehearsal, until it ends."""
        self._modes = Modes()
        """Those in which the user's code has called it."""
        self.boundary: Boundary = Boundary()
        self._as_it_is = module
        self._several: frozenset[int] = frozenset()
        """Inputs whose gradient is a sum over several uses."""
        self.room = Room([])
        """The device that it runs on."""
        self.interpreter: Interpreter | None = None
        """What runs it."""
        self._taken: tuple[Plan | None, GraphBytes] = (None, GraphBytes())
        self._larger = False
        """Whether it takes more than what it stands in for, whatever it runs by."""
        self.left = False
        """Whether it runs as it is."""
        self.stands_for: Subgraph | None = None
        """A graph that was rehearsed, and takes no less than this one."""
        self.others: list[Subgraph] = []
        """Graphs with the same inputs, which were met before: the same one with other shapes among them."""
        self.plans: GraphPlans | None = None
        """Those that it may run by, until the rehearsal ends."""

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments."""
        record = self.together.record
        if self.left:
            return self._as_it_is(*arguments)
        self.together.runs(self)
        if record is None:
            if self._ready is None:
                try:
                    self._ready = self.made(arguments)
                finally:
                    self.let_go()
                gc.collect()  # the user trains: nothing that planning has left may take memory
            self.together.fits(self)
            return self._ready(*arguments)
        if not record.listening:
            record.restore(self._changed(arguments))
            return self._ready(*arguments) if self._ready is not None else super().__call__(*arguments)
        self._modes = Modes()
        with record.call(self, arguments) as told:
            if self._ready is None or (self.plans is None and not self.together.live):
                self._ready = self.made(arguments)
            self.arguments = [] if self._trains else list(arguments)
            self.together.fits(self)
            record.restore(self._changed(arguments))
            results = self._ready(*arguments)
            told(results)
        return results

    def compiled(self, arguments: Sequence[Any], program: Programs, watch: Watch) -> Callable[..., Any]:
        """The graph for the shapes of these arguments, run by a Program."""
        self._larger = False
        function = super().compiled(arguments, program, watch)
        if self._larger:
            self.together.does_not_fit()
        self.interpreter = self.interpreters[-1] if self.interpreters else None
        if self.interpreter is not None:
            refuse_distributed_parts((), [call.target for call in self.interpreter.joint.calls])
        if self._aot is not None:
            self._several = self._aot.several
        return function if self.interpreter is None else with_uses_apart(function, self.interpreter)

    def made(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """The graph, captured until what it gives is what the capture says."""
        refuse_distributed_parts(arguments)
        return with_late_gradients(super().made(arguments), self._as_it_is, self.boundary.silent)

    def cross(
        self,
        used_behind: Collection[int] | None,
        silent: Collection[int] | None,
        strides: Mapping[int, tuple[int, ...]],
        *,
        planned: bool = False,
    ) -> bool:
        """Have gradients pass as they do in eager; whether the graph is to be made again for that.

        Others use these inputs too, behind a call of the graph, and gradients of these results never come
        (None: as before); the gradients of others arrive in these strides. What was seen in calls that it is
        ``planned`` for goes on to hold.
        """
        joint = self.joint
        if joint is None or len(joint.inputs) != len(self.leaves):
            return False
        before = self.boundary
        arriving = dict(before.arriving)
        for place, (result, tensor) in enumerate(zip(joint.tangents_of, joint.tangents, strict=False)):
            found, known = strides.get(-1 if result is None else result), joint.values[tensor]
            if found is not None and found != known.stride() and is_dense(known.shape, found):
                arriving[place] = Arriving(tuple(known.shape), found)
        now = replace(before, arriving=arriving, incoming=len(joint.tangents))
        if used_behind is not None:
            owner = joint.graph.storages()
            kept = {owner[t] for t in (*joint.outputs, *joint.graph.updated) if t is not None}
            free = {k for k, t in enumerate(joint.inputs) if t is not None and owner[t] not in kept}
            behind = {*used_behind, *(before.apart if planned else ())}
            now = replace(now, apart=self._several.intersection(behind, free))
        if silent is not None and not joint.graph.updated and not any(op.random for op in joint.graph.ops):
            never = (k for k in silent if k in joint.tangents_of and (not planned or k in before.silent))
            now = replace(now, silent=frozenset(never))
        changed = (now.apart, now.arriving, now.silent) != (before.apart, before.arriving, before.silent)
        if changed:
            self.cross_by(now)
        return changed

    def cross_by(self, boundary: Boundary) -> None:
        """Have gradients pass like this; the graph is made anew."""
        self.boundary, self._ready, self._aot, self._laid_out = boundary, None, None, None
        self.module = silenced(self._as_it_is, boundary.silent)

    @property
    def _trains(self) -> bool:
        """Whether the user trains meanwhile: a rehearsal may take no more than the budget then."""
        return self.together.live or self.together.trains

    def _changed(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Arguments that the graph updates."""
        if self.joint is None:
            return []
        names = {self.joint.graph.tensors[t].name for t in self.joint.graph.updated}
        pairs = zip(arguments, self.leaves, strict=False)
        return [a for a, leaf in pairs if has_storage(a) and leaf.name in names]

    def make(self, arguments: Sequence[Any], witness: Witness) -> Callable[..., Any] | None:
        """The graph as it was planned; one that comes later and is like another runs by the plan of that."""
        if self.together.record is None and self.together.adopted:
            ready = self._as_one_like(arguments)
            if ready is not None:
                return ready
        if self._counted is not None:
            self._counted.unlike, self._counted = self._counted.unlike + 1, None
        return super().make(arguments, witness)

    def _as_one_like(self, arguments: Sequence[Any]) -> Callable[..., Any] | None:
        """The graph by a plan that is known; None where there is none. It is not run to see that it holds."""
        made: list[Interpreter] = []

        def program(joint: Joint) -> Program:
            for one, known in self.together.adopted.items():
                self.plan = plan_of_one_like(joint.graph, [known])
                if self.plan is not None:
                    self.stands_for = one
                    return self.plan.program
            return store_all(joint.graph)

        ready = self.compiled(arguments, program, made.append)
        if self.plan is None or not made:
            return None
        self.joint, self.room, made[-1].plan = made[-1].joint, Room(arguments), self.plan
        return ready

    def _in_its_place(self, joint: Joint) -> tuple[int, int, Subgraph] | None:
        """The peak that this graph should have, what it may hold, and in whose place; None: nobody knows.

        It stands in for itself as it was planned before, the same graph with other shapes, or what ran there.
        """
        kinds = [op.kind for op in joint.graph.ops]
        same = [one for one in self.others if one.joint and kinds == [op.kind for op in one.joint.graph.ops]]
        for one in (self, *same[:1], self.together.in_its_place()):
            if one is not None and one.plan is not None:
                taken = one.taken()
                return max(1, taken.peak + min(0, self.together.left_bytes)), taken.held, one
        return None

    def _to_measure(
        self, arguments: Sequence[Any], room: Room, state: Sequence[torch.Tensor]
    ) -> Callable[[Joint], Program]:
        """The Program to measure with: once the step is planned, one that takes no more than it may."""
        if not self.together.orders:
            return super()._to_measure(arguments, room, state)
        given, pinned = [arguments], list[int]()

        def program(joint: Joint) -> Program:
            if given:  # what is compiled holds on to this function
                pinned.extend(pinned_leaves(joint, given.pop(), state))
            planner = StepPlanner(joint, Alone(room, 0), pinned=pinned)
            seconds = max(_SHORTEST, self._request.limits.time_limit / _SEARCHES)
            asked = replace(self._request.within(seconds).without("tile"), cost="estimated")
            other, self._fits = self._in_its_place(joint), True
            limit = 1 if other is None else other[0]
            if self.together.trains:
                limit = max(1, self.together.allowed(given_bytes(joint)))
            try:
                return planner.plan(None, replace(asked, budget=Budget(bytes=limit))).program
            except InfeasibleError:
                least = planner.plan(None, replace(asked, budget=Budget(bytes=1)), smallest=True)
                self._larger = least.predicted.peak_bytes > limit + max(0, self.together.left_bytes)
                return least.program

        return program

    def _best(
        self,
        joint: Joint,
        run: Callable[..., object] | None,
        room: Room,
        arguments: Sequence[Any],  # noqa: ARG002
        state: Sequence[torch.Tensor],  # noqa: ARG002
        pinned: Sequence[int],
    ) -> Plan:
        """The plan that holds least; later one that takes no more than what it stands in for."""
        seconds = max(_SHORTEST, self._request.limits.time_limit / _SEARCHES / max(1, self.together.count))
        limited = self._request.within(seconds).without("tile")

        def planned(
            run: Callable[..., object] | None,
            request: PlanRequest,
            peak: int,
            between: int,
            *,
            smallest: bool = False,
        ) -> Plan:
            asked = replace(request, budget=Budget(bytes=peak))
            planner = StepPlanner(joint, Alone(room, between), pinned=pinned)
            return planner.plan(run, asked, smallest=smallest)

        measured = functools.partial(planned, run, limited)
        self.joint, self.plans, self.room = joint, GraphPlans(joint, measured), room
        if self.together.tiles:
            self.plans.allow_tiles(self._in_tiles)
        if self.together.left_bytes < 0:  # what is predicted of the others says nothing of this one
            self.together.does_not_fit()
        other = self._in_its_place(joint) if self.together.orders else None
        if self.together.trains:  # those behind it need what it does not hold
            self.plan = self.plans.leanest
            if self.plan.predicted.peak_bytes > self.together.allowed(given_bytes(joint)):
                self.plan = self.plans.least(0)
        elif other is not None:
            peak, held, one = other
            self.plan = self.plans.in_place_of(peak, held)
            taken = self.taken()
            if taken.peak > peak + max(0, self.together.left_bytes) or taken.held > held:
                self.together.does_not_fit()
            elif taken.peak <= peak and taken.made <= one.taken().made:
                self.stands_for = one.stands_for or one
        else:
            self.plan = self.plans.least(0) if self.together.orders else self.plans.leanest
        if self._trains:  # what runs it holds its arguments; all of it was measured
            known = replace(limited, cost="known") if limited.cost == "measured" else limited
            self.plans.make = functools.partial(planned, None, known)
        return self.plan

    def relax(self) -> bool:
        """Have it run in tiles where there is no other plan; whether it is to be made again for that.

        Tiles add up in an order of their own, and so may the graph.
        """
        if self.boundary.apart:
            self.cross_by(replace(self.boundary, apart=frozenset()))
            return True
        if self.plans is not None:
            self.plans.allow_tiles(self._in_tiles)
        return False

    def _in_tiles(self, peak: int) -> Plan:
        """A plan in tiles with at most this peak. An InfeasibleError says why there is none."""
        joint, plans = self.joint, self.plans
        assert joint is not None
        assert plans is not None
        seconds = _TILES * self._request.limits.time_limit
        request = replace(self._request.within(seconds), budget=Budget(bytes=peak))
        plain = plans.least(0).plain
        try:
            if self.boundary.arriving:
                raise CaptureError("a gradient comes in strides of its own")
            arguments = self.arguments or zeros_for(joint)
            with self._modes.again(), no_trace(arguments, self.leaves, joint):
                alone = Alone(self.room, 0)
                return in_tiles(joint, arguments, alone, request, plain, time_limit=seconds)
        except CaptureError as error:
            said = str(error).splitlines()[0]
            raise InfeasibleError(said, budget=peak, smallest_budget=plain.peak_bytes, floor=0) from error

    def let_go(self) -> None:
        """Hold no arguments any more. It keeps what it is planned again by, where nobody can rehearse it."""
        kept = (self._aot, self.plans) if self.together.live else (None, None)
        super().let_go()
        self.arguments, self.others = [], []
        self._aot, self.plans = kept

    def taken(self) -> GraphBytes:
        """What it takes by its plan."""
        if self._taken[0] is not self.plan and self.plan is not None and self.joint is not None:
            self._taken = self.plan, graph_bytes(self.joint, self.plan)
        return self._taken[1]

    def forget(self) -> None:
        """Hold nothing of a rehearsal that failed."""
        self._ready = None
        self.let_go()

    def adopt(self, plan: Plan, *, verify: bool) -> None:
        """Run by this plan from now on, once it is compared with eager where that is asked for.

        An InfeasibleError: its tiles do not run as they were captured.
        """
        made: list[Interpreter] = []

        def promise(interpreter: Interpreter) -> None:
            interpreter.plan = plan
            made.append(interpreter)

        witness, same = Witness(self.layouts), True
        with self._modes.again():
            ready = self.compiled(self.arguments, lambda _: plan.program, promise)
            if made and self.joint is not None and (verify or has_loop(plan.program)):
                arguments = self.arguments or zeros_for(self.joint)
                verification = Verification(self.module, arguments, self.leaves, self.joint, plan)
                compared = verification if verify else None
                same = self.rehearsed(ready, made[-1], arguments, witness, compared)
        if not same and self.plans is not None:
            self.plans.dismiss(plan)
            said = f"its tiles lie in memory otherwise than torch says while it traces: {witness.about}"
            peak = plan.predicted.peak_bytes
            raise InfeasibleError(said, budget=peak, smallest_budget=plan.plain.peak_bytes, floor=0)
        self.plan, self.stands_for = plan, None
        self._ready = with_late_gradients(ready, self._as_it_is, self.boundary.silent)
