"""The plans that one of several graphs may run by: with less of a peak, or with less to hold for backward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lowtide.errors import InfeasibleError
from lowtide.execute.memory.device import Room
from lowtide.execute.runtime.handover import handed_over, old_values
from lowtide.execute.runtime.prepare import random_again
from lowtide.execute.runtime.tile_loop import zeros
from lowtide.execute.tiling.plan_tiles import with_loop
from lowtide.graph import RESIDENT_ROLES, Graph, Role
from lowtide.plan.make.share_budget import GraphPlan, SharedGraph, only_plan
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import Memory, allocated_bytes
from lowtide.plan.program.simulate import RANDOM_STATE_BYTES
from lowtide.plan.result.plan import Plan
from lowtide.trace.step.joint import Joint
from lowtide.units import format_bytes, format_seconds

__all__ = [
    "Alone",
    "GraphBytes",
    "GraphPlans",
    "as_planned",
    "given_bytes",
    "graph_bytes",
    "held_bytes",
    "in_words",
    "zeros_for",
]


class Alone(Room):
    """The device, as if nothing else were on it: what is there is counted for all graphs together."""

    def __init__(self, room: Room, between: int) -> None:
        super().__init__([])
        self.device, self.argument_bytes, self.between_bytes = room.device, room.argument_bytes, between

    def outside_bytes(self) -> int:
        """Nothing."""
        return 0


class GraphPlans:
    """Plans of a graph, made when they are asked for."""

    def __init__(self, joint: Joint, make: Callable[..., Plan]) -> None:
        """``make`` plans it for a peak, where others need so many bytes between forward and backward.

        With ``smallest`` the plan is the one that takes least, whatever that is.
        """
        self._joint, self.make = joint, make
        self._known: list[tuple[Plan, int, int]] = []
        """Plans that were made, with the peak that they may have and what they may hold."""
        self._refused: list[tuple[str, int, int]] = []
        """The same of plans that were not found: why. An error would hold what its traceback does."""
        self._least: dict[int, Plan] = {}
        """The plans that take least, by what others need."""
        self.passing_bytes = _passing_bytes(joint)
        """What goes in and comes out, with gradients that come in."""
        self.in_tiles: Callable[[int], Plan] | None = None
        """Gives a plan in tiles with at most this peak, where they are allowed."""
        self.no_tiles = ""
        """Why there was no plan in tiles, where one was looked for."""
        self._held: dict[int, int] = {}
        self._alive: list[Plan] = []
        """Plans of which it is known what they hold."""

    def within(self, peak: int, held: int) -> Plan:
        """A plan with at most this peak, which holds at most so much. An InfeasibleError: none was found."""
        for plan, most_peak, most_held in self._known:  # the best for more is the best for this, if it fits
            fits = plan.predicted.peak_bytes <= peak and self.held(plan) <= held
            if fits and peak <= most_peak and held <= most_held:
                return plan
        for why, most_peak, most_held in self._refused:
            if peak <= most_peak and held <= most_held:
                raise InfeasibleError(why, budget=peak, smallest_budget=most_peak, floor=0)
        try:
            plan = self._found(peak, held)
        except InfeasibleError as error:
            self._refused.append((str(error), peak, held))
            raise
        self._known.append((plan, peak, held))
        return plan

    def _found(self, peak: int, held: int) -> Plan:
        """The same, which nobody has asked for before: in tiles where there is no other."""
        try:
            return self.make(peak, max(0, peak - held - self.passing_bytes))
        except InfeasibleError:
            if self.in_tiles is None:
                raise
        try:
            plan = self.in_tiles(peak)
        except InfeasibleError as error:
            self.no_tiles = str(error).splitlines()[0]
            raise
        if (more := self.held(plan)) > held:
            self.no_tiles = f"a graph would hold {format_bytes(more)} for its backward"
            raise InfeasibleError(self.no_tiles, budget=peak, smallest_budget=peak, floor=0)
        return plan

    def allow_tiles(self, in_tiles: Callable[[int], Plan]) -> None:
        """From now on plans may be in tiles, where there are no others."""
        self.in_tiles, self._refused = in_tiles, []

    def dismiss(self, plan: Plan) -> None:
        """Forget a plan that does not run as it was captured."""
        self._known = [one for one in self._known if one[0] is not plan]

    def least(self, others_bytes: int) -> Plan:
        """The plan that takes least where others need so many bytes between its forward and its backward."""
        if others_bytes not in self._least:
            self._least[others_bytes] = self.make(1, others_bytes, smallest=True)
        return self._least[others_bytes]

    @property
    def plain(self) -> Plan:
        """The plan that recomputes nothing."""
        peak = self.least(0).plain.peak_bytes
        return self.within(peak, peak)

    @property
    def leanest(self) -> Plan:
        """The plan that holds least."""
        return self.least(self.least(0).plain.peak_bytes)

    def in_place_of(self, peak: int, held: int) -> Plan:
        """A plan that takes no more than another graph does in its place; else the one nearest to that."""
        with contextlib.suppress(InfeasibleError):
            return self.within(peak, held)
        between = max(0, peak - held - self.passing_bytes)
        plans = self.least(between), self.least(0), self.leanest
        return min(plans, key=lambda one: max(one.predicted.peak_bytes - peak, self.held(one) - held))

    def held(self, plan: Plan) -> int:
        """What forward leaves for backward by this plan, besides what goes in and comes out."""
        if id(plan) not in self._held:
            self._held[id(plan)] = held_bytes(self._joint, plan.program)
            self._alive.append(plan)
        return self._held[id(plan)]

    def shared(self) -> SharedGraph[Plan]:
        """The graph as one of several."""

        def as_shared(plan: Plan) -> GraphPlan[Plan]:
            return GraphPlan(plan.predicted.peak_bytes, self.held(plan), plan.predicted.seconds, plan)

        return SharedGraph(
            plain=as_shared(self.plain),
            passing_bytes=self.passing_bytes,
            within=lambda peak, held: as_shared(self.within(peak, held)),
            least=lambda others: as_shared(self.least(others)),
        )


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """What a graph takes by a plan."""

    peak: int = 0
    held: int = 0
    """From the end of its forward to its backward, besides what goes in and comes out."""
    given: int = 0
    """What goes in, with gradients of parameters: it is on the device already, or counted with all leaves."""
    made: int = 0
    """What comes out and was not given."""
    gradients: int = 0
    """The part of what is given that are gradients of parameters."""


def graph_bytes(joint: Joint, plan: Plan) -> GraphBytes:
    """What a graph takes by this plan."""
    owner = joint.graph.storages()
    made = {owner[t] for t in joint.outputs if t is not None}
    made -= {owner[t] for t in joint.inputs if t is not None}
    given = {owner[t] for t in joint.inputs if t is not None}
    return GraphBytes(
        peak=plan.predicted.peak_bytes,
        held=held_bytes(joint, plan.program),
        given=given_bytes(joint),
        made=_allocated(joint.graph, made),
        gradients=given_bytes(joint) - _allocated(joint.graph, given),
    )


def in_words(joint: Joint, plan: Plan) -> str:
    """What a graph takes by this plan, and what it hands on."""
    out = format_bytes(sum(joint.graph.tensors[t].bytes for t in joint.outputs if t is not None))
    held = format_bytes(held_bytes(joint, plan.program))
    tiles = f"in {plan.decisions.tiles} tiles, " if plan.decisions.tiles else ""
    taken, plain = format_bytes(plan.predicted.peak_bytes), format_bytes(plan.plain.peak_bytes)
    return (
        f"{taken} of {plain} plain, {tiles}{plan.overhead:+.1%} on {format_seconds(plan.plain.seconds)}; "
        f"holds {held} for its backward, hands on {out}"
    )


def given_bytes(joint: Joint) -> int:
    """What goes into a graph, with gradients of parameters."""
    graph = joint.graph
    owner = graph.storages()
    pairs = [
        (t, gradient) for t, gradient in itertools.zip_longest(joint.inputs, joint.gradients) if t is not None
    ]
    trained = {owner[t] for t, gradient in pairs if gradient is not None}
    parameters = {t for t in trained if graph.tensors[t].role is Role.PARAMETER}
    return _allocated(graph, {owner[t] for t, _ in pairs}) + _allocated(graph, parameters)


def _allocated(graph: Graph, tensors: Iterable[int]) -> int:
    return sum(allocated_bytes(graph.tensors[t]) for t in tensors)


def as_planned(joint: Joint, plan: Plan) -> SharedGraph[Plan]:
    """A graph that keeps its plan, as one of several."""
    held = held_bytes(joint, plan.program)
    kept = GraphPlan(plan.predicted.peak_bytes, held, plan.predicted.seconds, plan)
    return only_plan(kept, _passing_bytes(joint))


def held_bytes(joint: Joint, program: Program) -> int:
    """What forward leaves for backward, besides what goes in and comes out.

    Random states and buffers as they were before are among it.
    """
    joint = with_loop(joint, program)
    graph = joint.graph
    owner, old = graph.storages(), old_values(graph)
    handed = handed_over(joint, program, frozenset(), old)
    outside = {owner[t] for t in joint.outputs if t is not None}
    held = {owner[t] for t in handed} - outside
    kept = [t for t in held if t in old or graph.tensors[t].role not in RESIDENT_ROLES]
    states = len(random_again(joint, program)) * RANDOM_STATE_BYTES
    return states + _allocated(graph, kept)


def _passing_bytes(joint: Joint) -> int:
    graph = joint.graph
    owner = graph.storages()
    passing = {owner[t] for t in (*joint.outputs, *joint.tangents) if t is not None}
    made = (t for t in passing if graph.tensors[t].role not in RESIDENT_ROLES)
    return Memory(graph).resident_bytes + _allocated(graph, made)


def zeros_for(joint: Joint) -> list[Any]:
    """Arguments of a graph to try it with, where those of the rehearsal are gone."""
    pairs = itertools.zip_longest(joint.inputs, joint.gradients)  # some graphs have no backward
    return [
        None if t is None else zeros(joint.values[t]).requires_grad_(gradient is not None)
        for t, gradient in pairs
    ]
