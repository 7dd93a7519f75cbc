"""What CUDA graphs need beside what a plan counts: copies of the batch, and what an arena loses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from lowtide.errors import InfeasibleError
from lowtide.execute.graphs.arena.pages import SMALL
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.reserved import refuse_elsewhere
from lowtide.graph import RESIDENT_ROLES, Role
from lowtide.plan.program.instructions import Body, Loop, Program, Run
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.step.joint import Leaf

__all__ = ["apart", "reserve", "with_arena"]

_AT_FIRST = 32 << 20
"""Bytes that are left for an arena to lose before there is a plan."""
_WHILE_IT_RUNS = 24 << 20
"""While an operator runs, a segment of PyTorch's (20 MiB) may not be full, nor one of small tensors."""
_BETWEEN = 200
"""One part in so many may be lost between the places of an arena."""
_PLANS = 3
"""A step is planned so many times at most, each time with more left for the arena."""
_SLOWER = 1.05
"""So many times what a plan without graphs takes is too much."""

Rest = TypeVar("Rest")


def reserve(room: Room, request: PlanRequest, arguments: Sequence[Any], leaves: Sequence[Leaf]) -> None:
    """Leave memory of a device alone for graphs of a step, where they are asked for."""
    refuse_elsewhere(request.reserved, room.device)
    room.counts_reserved = bool(request.reserved)
    if request.graphs == "off" or room.device.type != "cuda":
        return
    pairs = zip(arguments, leaves, strict=False)
    batch = [one for one, leaf in pairs if isinstance(one, torch.Tensor) and leaf.role is Role.INPUT]
    room.lost_bytes = _AT_FIRST
    room.graph_bytes = sum(one.nbytes for one in batch) + room.lost_bytes


def with_arena(
    made: Callable[[], tuple[Plan, Rest]], room: Room, launch_seconds: Callable[[str], float]
) -> tuple[Plan, Rest]:
    """A plan beside which what its arena loses fits; one without graphs where there is none, or it is slower.

    It comes with what ``made`` gives beside it. Launching an operator takes the host of a kind of device
    ``launch_seconds`` at least.
    """
    try:
        found = _beside_arena(made, room)
    except InfeasibleError:
        if not room.graph_bytes:
            raise
        _leave_nothing(room, "no plan that was found leaves memory for them")
        return made()
    plan, seconds = found[0], found[0].predicted.seconds
    fast = seconds <= _SLOWER * plan.plain.seconds or not plan.plain.seconds
    if not room.graph_bytes or plan.interrupted or fast:
        return found
    left = room.graph_bytes, room.lost_bytes
    _leave_nothing(room, "")
    try:
        with suppress(InfeasibleError):
            other = made()
            launching = launch_seconds(room.device.type) * _launches(other[0].program)
            without = max(other[0].predicted.seconds, launching)
            # each plan by its own measurements of the step, which may have become better with each
            times = seconds / plan.plain.seconds * other[0].plain.seconds / without
            if times > _SLOWER:
                room.no_graphs = f"a plan that leaves memory for them would take {times:.2f} times as long"
                left = 0, 0
                return other
    finally:
        room.graph_bytes, room.lost_bytes = left
    return found


def _leave_nothing(room: Room, why: str) -> None:
    room.graph_bytes = room.lost_bytes = 0
    room.no_graphs = why


def _beside_arena(made: Callable[[], tuple[Plan, Rest]], room: Room) -> tuple[Plan, Rest]:
    """A plan beside which what its arena loses fits, or nearly, where there is no more."""
    found = made()
    for _ in range(_PLANS if room.lost_bytes else 0):
        plan = found[0]
        spare = room.lost_bytes + plan.budget_bytes - plan.predicted.peak_bytes
        missing = apart(plan) + _WHILE_IT_RUNS + plan.predicted.peak_bytes // _BETWEEN - spare
        if missing <= 0:
            break
        before = room.graph_bytes, room.lost_bytes
        room.graph_bytes, room.lost_bytes = room.graph_bytes + missing, room.lost_bytes + missing
        try:
            found = made()
        except InfeasibleError:
            room.graph_bytes, room.lost_bytes = before
            break
    return found


def _launches(program: Program) -> int:
    """How many operators the host launches, those of tiles included."""
    bodies = [_launches(body.program) for body in program.bodies]
    lines = [line for line in program.instructions if isinstance(line, Run)]
    loops = [line for line in lines if isinstance(line, Loop)]
    return len(lines) - len(loops) + sum(bodies[tile.body] for loop in loops for tile in loop.tiles)


def apart(plan: Plan) -> int:
    """Bytes that small tensors, which lie in a pool of their own, take while the arena does not need them."""
    whole = Body(plan.graph, plan.program, plan.workspace_bytes)
    return _peak(whole, _is_small) + _peak(whole, _is_large) - _peak(whole, lambda _: True)


def _is_small(size: int) -> bool:
    return size <= SMALL


def _is_large(size: int) -> bool:
    return size > SMALL


def _peak(body: Body, counts: Callable[[int], bool]) -> int:
    """Of what has some sizes alone."""
    one = _only(body, counts)
    return simulate(one.graph, one.program, workspace_bytes=one.workspace_bytes).peak_bytes


def _only(body: Body, counts: Callable[[int], bool]) -> Body:
    """The same without leaves, and with tensors and workspaces of some sizes alone, in tiles too."""

    def size(of: int) -> int:
        return of if counts(of) else 0

    tensors = tuple(
        replace(one, bytes=0 if one.role in RESIDENT_ROLES else size(one.bytes)) for one in body.graph.tensors
    )
    return replace(
        body,
        graph=replace(body.graph, tensors=tensors),
        program=replace(body.program, bodies=tuple(_only(one, counts) for one in body.program.bodies)),
        workspace_bytes=tuple(map(size, body.workspace_bytes)),
    )
