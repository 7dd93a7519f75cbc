"""A captured function that is planned at its first call, when its arguments are there to measure it with."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import fx

from lowtide.cost.watch import Marker
from lowtide.errors import CaptureError, InfeasibleError, PlanError
from lowtide.execute.compile.family import Family
from lowtide.execute.compile.first_call import Differs, FirstCall, MeasuringRun
from lowtide.execute.compile.trial import Rehearsal, Rehearsed, no_trace
from lowtide.execute.compile.verify import Verification
from lowtide.execute.graphs.room import reserve, with_arena
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.optimizer_state import layout, state_of, with_state
from lowtide.execute.memory.reserved import tried_within
from lowtide.execute.planning.kept import Kept
from lowtide.execute.planning.plan_step import StepPlanner, warn_interrupted
from lowtide.execute.planning.splitting import NotFaster, Splitting, in_less_time, marked
from lowtide.execute.planning.step_costs import device_of, launch_seconds
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.runtime.parameter_offload import bring_back, pinned_leaves
from lowtide.execute.runtime.witness import Witness
from lowtide.execute.tiling.plan_tiles import (
    beside_tiles,
    beyond_budget,
    cut_as_it_runs,
    good_without_tiles,
    in_tiles,
    loop_of,
    refused_for_tiles,
    without_tiles,
)
from lowtide.graph import Phase
from lowtide.plan import time_shares
from lowtide.plan.budget import Budget
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simple import store_all
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan, Side
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.step.joint import Joint, Leaf
from lowtide.units import format_seconds

__all__ = ["Planned"]

_PLANS = 3
"""Tiles are planned so many times at most, until what is around them is known to fit."""


class Planned(FirstCall):
    """The function, compiled twice at its first call: once to be measured, once to run as planned.

    It is planned again where the optimiser's state has changed, as after the first step of all.
    """

    may_split = True
    """Whether some of its convolutions may run in less memory."""

    def __init__(
        self,
        module: fx.GraphModule,
        leaves: Sequence[Leaf],
        layouts: Layouts,
        request: PlanRequest,
        seen: Callable[[Plan], None] | None,
        rehearsal: Rehearsal,
        family: Family | None = None,
    ) -> None:
        super().__init__(module, leaves, layouts, family)
        self._request, self._seen, self._rehearsal = request, seen, rehearsal
        self._fused = request.kernels == "fused"
        self._layout_seconds = time_shares.LAYOUT * request.limits.time_limit
        self._state: Callable[[], list[torch.Tensor]] = list
        self._planned_for: Hashable = ()
        self._fits = True
        """Whether the step can be run to measure it."""
        self._to_keep: tuple[Kept, Plan] | None = None
        """A new plan in tiles, or one that is faster than those, and where to put it."""
        self._doubted = False
        """Whether a plan in tiles was seen to need more than it says: one that was kept may be no better."""
        self._planner: StepPlanner | None = None
        """What plans the step, while it is made ready."""
        self._splitting = Splitting(allowed=self.may_split)
        """Which convolutions to split, while it is made ready."""

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments; while somebody rehearses, nothing but a plan comes of it."""
        if self._ready is None or layout(self._state()) != self._planned_for:
            try:
                self._ready = self.made(arguments)
            finally:
                self.let_go()
        if self._rehearsal.now:
            raise Rehearsed
        return self._ready(*arguments)

    def let_go(self) -> None:
        """Hold nothing that only making it ready needs."""
        super().let_go()
        self._planner, self._splitting = None, Splitting(allowed=self.may_split)
        self._split = frozenset()

    def run_eagerly(self) -> None:
        """The same, and plan for them."""
        super().run_eagerly()
        self._request = replace(self._request, kernels="eager")

    def make(self, arguments: Sequence[Any], witness: Witness) -> Callable[..., Any] | None:
        """The function as it was planned; with split convolutions where nothing fits without."""
        while True:
            asked, split = self._request, self._split
            if split:
                self._request = in_less_time(asked, split, self._splitting.budget)
            try:
                return self._as_planned(arguments, witness)
            except InfeasibleError as error:
                chosen = self._splitting.next(error, self._planner, split)
            finally:
                if split:
                    self._request = asked
            self._aot, self._split = None, chosen

    def _faster(self, plan: Plan, arguments: Sequence[Any], witness: Witness) -> Callable[..., Any] | None:
        """The function with more split convolutions; NotFaster where there are none, or it is not faster."""
        more = self._splitting.faster(plan, self._planner, self._split)
        if more is None:
            raise NotFaster
        asked, made = self._request, list(self.interpreters)
        before = self._aot, self._split, self._planner, self._fits, self._to_keep
        self._aot, self._split, self._request = None, more, in_less_time(asked, more, plan.budget_bytes)
        ready: Callable[..., Any] | None = None
        try:
            ready = self._as_planned(arguments, witness)
            if ready is None:  # it is captured and planned again
                self._splitting.undecided()
        except InfeasibleError:
            raise NotFaster from None
        except KeyboardInterrupt:
            self._splitting.undecided()
            warn_interrupted()
            raise NotFaster from None
        finally:
            self._request = asked
            self._splitting.decided()
            if ready is None:
                self._aot, self._split, self._planner, self._fits, self._to_keep = before
                self.interpreters[:] = made
        return ready

    def _as_planned(self, arguments: Sequence[Any], witness: Witness) -> Callable[..., Any] | None:
        """The function as it was planned, once a step of it has shown that it was captured as it runs."""
        made: list[Interpreter] = []
        self._doubted = False
        bring_back()
        self.family.shapes.make_way()
        device = Room(arguments).device
        self._request = self._as_for_others(self._request.on(device.type))
        self._state = state_of(self._request.optimizer, device)
        state = self._state()
        self._planned_for = layout(state)
        room = Room([*arguments, *state])
        reserve(room, self._request, arguments, self.leaves)
        program = self._to_measure(arguments, room, state)
        measuring = self.compiled(arguments, program, made.append)
        joint = made[0].joint
        run = MeasuringRun(self, measuring, made[0], arguments, witness)
        pinned = pinned_leaves(joint, arguments, state)
        self._splitting.look(joint, self._kept(joint, room, arguments, state, pinned), self._split)
        measured = None if self._request.tiles and not self._fits else run
        split = self._split

        def best() -> tuple[Plan, tuple[Kept, Plan] | None]:
            found = self._best(joint, measured, room, arguments, state, pinned)
            return msgspec.structs.replace(found, program=marked(found.program, split)), self._to_keep

        def planned(again: Joint) -> Program:
            if again.graph != joint.graph:  # a plan in tiles has a graph of its own
                raise PlanError("the step was captured differently the second time; report this as a bug")
            return plan.program

        def promise(interpreter: Interpreter) -> None:
            interpreter.plan, shapes = plan, self.family.shapes
            interpreter.graphs = shapes.replayed(interpreter, self._request.graphs, room)
            made.append(interpreter)

        try:
            if self._fits and not self._measured_at_once(device):
                run()
            plan, self._to_keep = with_arena(best, room, launch_seconds)
            self._splitting.compare(plan)
            if self._fits and not run.ran:
                run()
        except Differs:
            return None
        with suppress(NotFaster):
            return self._faster(plan, arguments, witness)
        for attempt in range(_PLANS):
            if attempt:
                plan, self._to_keep = with_arena(best, room, launch_seconds)
            ready = measuring
            if plan.program == made[0].program:
                promise(made[0])
            else:
                ready = self.compiled(arguments, planned, promise)
            missing = self._missing(plan, ready, made[-1], arguments, witness)
            if missing <= 0:
                break
            self._doubted = True
        else:
            raise refused_for_tiles(plan, missing)
        self._made(plan, arguments)
        again = self._verified(plan, room, joint, arguments)
        seen = again is None and self._fits and loop_of(plan.program) is None  # all its operators ran before
        once = partial(self.rehearsed, ready, made[-1], arguments, witness)
        again, seen = None, seen or once(again)
        return ready if seen and tried_within(self._request.reserved, device, once) else None

    def _as_for_others(self, request: PlanRequest) -> PlanRequest:
        """What is asked for: a share is no less than it was for other shapes of the function."""
        if request.budget.share is None:
            return request
        return replace(request, budget=replace(request.budget, at_least=self.family.shapes.budget_bytes))

    def _measured_at_once(self, device: torch.device) -> bool:
        """Whether one run both shows that the step was captured as it runs and measures it.

        That does where other shapes ran and workspaces alone are measured; on CUDA, libraries take more of
        them in a first run.
        """
        familiar = self._planner is not None and self._planner.familiar
        return familiar and device.type == "cpu" and self._request.cost == "measured"

    def _missing(
        self,
        plan: Plan,
        function: Callable[..., Any],
        interpreter: Interpreter,
        arguments: Sequence[Any],
        witness: Witness,
    ) -> int:
        """What a plan in tiles takes beyond its budget; if it was kept, as far as is known."""

        def run(marker: Marker) -> None:
            interpreter.marker = marker
            try:
                self.rehearsed(function, interpreter, arguments, witness)
            finally:
                interpreter.marker = None

        return beyond_budget(plan, interpreter.joint, None if self._to_keep is None else run)

    def _made(self, plan: Plan, arguments: Sequence[Any]) -> None:
        """Tell of a plan that is known to hold, and keep it for other shapes; in tiles, keep it in a file."""
        if self._to_keep is not None:
            kept, tiled = self._to_keep
            kept.store(tiled)
            self._to_keep = None
        self._splitting.keep(plan, self._split)
        if loop_of(plan.program) is None:
            self.family.plans.add(arguments, plan)
        else:
            self.family.plans.planned = True
        if any(op.phase is Phase.BACKWARD for op in plan.graph.ops):
            self.family.shapes.budget_bytes = max(self.family.shapes.budget_bytes, plan.budget_bytes)
        if self._seen is not None:
            self._seen(plan)

    def _verified(
        self, plan: Plan, room: Room, joint: Joint, arguments: Sequence[Any]
    ) -> Verification | None:
        """What compares a step with eager PyTorch, where that is asked for and fits into the device."""
        asked = self._rehearsal.now and self._rehearsal.verify
        if not asked or plan.plain.peak_bytes > room.free_bytes():
            return None
        return Verification(self.module, arguments, self.leaves, joint, plan)

    def _best(
        self,
        joint: Joint,
        run: Callable[[Marker], object] | None,
        room: Room,
        arguments: Sequence[Any],
        state: Sequence[torch.Tensor],
        pinned: Sequence[int],
    ) -> Plan:
        """The plan for the whole step, or one in tiles where they are allowed and faster, or alone fit.

        ``run`` is None where the step can only run in tiles: the whole of it is estimated then.
        """
        request = self._request
        self._to_keep = None
        refused: InfeasibleError | None = None
        whole: Plan | None = None
        kept = self._kept(joint, room, arguments, state, pinned) if request.tiles else None
        known = kept.load() if kept is not None and not self._doubted else None
        if known is not None:
            return known
        began = time.monotonic()
        try:
            assert self._planner is not None
            whole = self._planner.plan(run, beside_tiles(self._request))
            plain, budget = whole.plain, whole.budget_bytes
        except InfeasibleError as error:
            if not request.tiles:
                raise
            refused, budget = error, error.budget
            plain = Side(error.plain_peak, error.plain_seconds)
        spent = time.monotonic() - began
        if whole is not None and (enough := good_without_tiles(whole, request)) is not None:
            return enough
        left = max(
            time_shares.TILES_AT_LEAST * request.limits.time_limit,
            time_shares.WHOLE_AND_TILES * request.limits.time_limit - spent,
        )
        exactly = replace(request, budget=Budget(bytes=budget))
        try:
            with no_trace(arguments, self.leaves, joint):
                rival = whole.predicted.seconds if whole is not None and self._fused else None
                tiled = in_tiles(joint, arguments, room, exactly, plain, state, time_limit=left, rival=rival)
                tiled = msgspec.structs.replace(tiled, solve_seconds=spent + tiled.solve_seconds)
        except KeyboardInterrupt:
            if whole is None:
                raise
            warn_interrupted()
            without = without_tiles(whole, request, "the search was interrupted before any were found")
            return msgspec.structs.replace(without, interrupted=True)
        except (CaptureError, InfeasibleError) as error:
            if refused is not None:
                refused.args = (f"{refused}\ntiles: {str(error).splitlines()[0]}",)
                raise refused from None
            assert whole is not None
            return self._untiled(whole, str(error).splitlines()[0], kept)
        if whole is not None and whole.predicted.seconds <= tiled.predicted.seconds:
            slower = f"{tiled.decisions.tiles} tiles would take {format_seconds(tiled.predicted.seconds)}"
            whole = msgspec.structs.replace(whole, solve_seconds=tiled.solve_seconds)
            return self._untiled(whole, slower, None if tiled.interrupted else kept)
        if tiled.interrupted:
            warn_interrupted()
        elif kept is not None:
            self._to_keep = kept, tiled
        return tiled

    def _untiled(self, plan: Plan, why: str, kept: Kept | None) -> Plan:
        """A plan without tiles that is faster than those in tiles; with fused kernels it is kept as such.

        Tiles of those are compiled: the next time none are looked for.
        """
        found = without_tiles(plan, self._request, why)
        if kept is not None and self._fused:
            self._to_keep = kept, found
        return found

    def _kept(
        self,
        joint: Joint,
        room: Room,
        arguments: Sequence[Any],
        state: Sequence[torch.Tensor],
        pinned: Sequence[int],
    ) -> Kept:
        """A plan in tiles that was made before."""
        request = self._request
        free = room.free_bytes() if request.budget.auto else None

        def whole(plan: Plan) -> Joint:
            return cut_as_it_runs(joint, plan.program, arguments, Witness(self.layouts), state)

        return Kept(
            with_state(joint.graph, state),
            frozenset(),
            request,
            device_of(joint.graph),
            DeviceRoom(room.outside_bytes(), free, pinned=pinned),
            whole,
            state,
        )

    def _to_measure(
        self, arguments: Sequence[Any], room: Room, state: Sequence[torch.Tensor]
    ) -> Callable[[Joint], Program]:
        """The Program to measure with."""

        def program(joint: Joint) -> Program:
            others, pinned = self.family.plans.others(arguments), pinned_leaves(joint, arguments, state)
            self._planner = StepPlanner(joint, room, state=state, pinned=pinned, others=others)
            found = self._planner.to_measure(beside_tiles(self._request))
            self._fits = found is not None
            return marked(found or store_all(joint.graph), self._split)

        return program
