"""The plan of a step in tiles, and the step as such a plan runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from lowtide.capture.joint import Joint
from lowtide.capture.loop import looped
from lowtide.capture.nested import Inner
from lowtide.capture.owned import Owned
from lowtide.errors import InfeasibleError
from lowtide.execute.attempts import Search
from lowtide.execute.cutting import Cutter
from lowtide.execute.planning import Settings
from lowtide.execute.room import Room
from lowtide.execute.state import with_state
from lowtide.graph import Rect
from lowtide.plan.plan import Plan, Side
from lowtide.plan.program import Loop, Program
from lowtide.plan.tile import least_bytes
from lowtide.units import format_bytes

__all__ = ["in_tiles", "loop_of", "with_loop"]


def loop_of(program: Program) -> Loop | None:
    """The loop of a Program, if it has one."""
    return next((line for line in program.forward if isinstance(line, Loop)), None)


def with_loop(joint: Joint, program: Program) -> Joint:
    """The captured step as the Program runs it: with a region as one operator, where it has a loop."""
    loop = loop_of(program)
    if loop is None:
        return joint
    boxes = [tile.over for tile in loop.tiles]
    inner, own = _inner(program), _own(program)
    return looped(joint, boxes, loop.cut, loop.end, channels_last=loop.channels_last, inner=inner, own=own)


def _own(program: Program) -> Owned | None:
    """Which input tiles own, where they do."""
    loops = [line for line in program.backward if isinstance(line, Loop) and line.own]
    return Owned(loops[0].own, [tile.over for tile in loops[0].tiles]) if loops else None


def _inner(program: Program) -> Inner | None:
    """The loops inside tiles as the Program has them, body after body."""
    loops = [loop_of(body.program) for body in program.bodies]
    left = iter(loops)

    def chosen(_: Joint) -> tuple[str, list[Rect]] | None:
        loop = next(left, None)
        return None if loop is None else (loop.end, [tile.over for tile in loop.tiles])

    return chosen if any(loops) else None


def in_tiles(
    joint: Joint,
    arguments: Sequence[Any],
    room: Room,
    settings: Settings,
    budget: int,
    plain: Side,
    state: Sequence[torch.Tensor] = (),
    *,
    time_limit: float | None = None,
) -> Plan:
    """The fastest plan found that cuts the step into tiles; an optimiser's ``state`` counts in its peak.

    ``time_limit`` is for capturing tiles and planning with them; measuring them comes on top. A CaptureError
    says why it cannot be cut, an InfeasibleError that no way to cut it fits.
    """
    least = least_bytes(with_state(joint.graph, state)) + room.beside_bytes()
    if least > budget:
        raise InfeasibleError(
            f"none can help: parameters, inputs and gradients alone take {format_bytes(least)}",
            budget=budget,
            smallest_budget=least,
            floor=least,
            proven=True,
        )
    cutter = Cutter(joint, arguments, room, settings)
    limit = settings.time_limit if time_limit is None else time_limit
    search = Search(joint, cutter, room, settings, budget, plain, state, time_limit=limit)
    search.try_all()
    if search.best is None:
        raise search.refused or InfeasibleError(
            "none is small enough", budget=budget, smallest_budget=plain.peak_bytes, floor=0, proven=False
        )
    search.polish()
    return msgspec.structs.replace(search.best, solve_seconds=search.spent(), interrupted=search.interrupted)
