"""The plan of a step in tiles, and the step as such a plan runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from lowtide.cost.watch import Marker
from lowtide.errors import CaptureError, InfeasibleError, PlanError
from lowtide.execute.kernels.compile_groups import compile_groups
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.optimizer_state import with_state
from lowtide.execute.planning.step_costs import costs_of, device_of
from lowtide.execute.runtime.fits import refuse_invalid
from lowtide.execute.runtime.witness import Witness
from lowtide.execute.tiling.capture_tiles import Cutter, watch_tiles
from lowtide.execute.tiling.search import Search
from lowtide.execute.tiling.settle import settle
from lowtide.graph import Rect
from lowtide.plan import time_shares
from lowtide.plan.check.rules import Rule, broken
from lowtide.plan.check.tiles import wrong_boxes
from lowtide.plan.make.plan_loop import least_bytes
from lowtide.plan.program.instructions import Loop, Program
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan, Side
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.loop import looped
from lowtide.trace.tiles.nested import Inner
from lowtide.trace.tiles.owned import Owned
from lowtide.trace.tiles.tiling import Tiling
from lowtide.units import format_bytes

__all__ = [
    "beside_tiles",
    "beyond_budget",
    "cut_as_it_runs",
    "good_without_tiles",
    "has_loop",
    "in_tiles",
    "loop_of",
    "refused_for_tiles",
    "with_loop",
    "without_tiles",
]

_NO_TILES = 0.02
"""Tiles are not looked for where a plan without them adds no more than this."""
_NO_FUSED_TILES = 0.1
"""The same with fused kernels, where the groups of tiles would have to be compiled."""
_CUTS = 8
"""A step is cut so many times at most: what is learned shows what else is to be learned."""


def loop_of(program: Program) -> Loop | None:
    """The loop of a Program in forward, if it has one."""
    return next((line for line in program.forward if isinstance(line, Loop)), None)


def beyond_budget(plan: Plan, joint: Joint, run: Callable[[Marker], object] | None) -> int:
    """Bytes that a plan in tiles takes more than its budget, with what operators around its loops need.

    Some of them run for the first time: behind a loop, tensors lie in memory otherwise. What they need was
    estimated, and is measured while ``run`` runs the step; without it, what is known counts.
    """
    if loop_of(plan.program) is None or plan.cost != "measured":
        return 0
    targets, origin = [call.target for call in joint.calls], "known" if run is None else "measured"
    costs = costs_of(joint.graph, targets, device_of(joint.graph), run, origin)
    workspace = [max(pair) for pair in zip(costs.workspace_bytes, plan.workspace_bytes, strict=True)]
    taken = simulate(plan.graph, plan.program, workspace_bytes=workspace).peak_bytes
    return taken + plan.beside_bytes - plan.budget_bytes


def refused_for_tiles(plan: Plan, missing: int) -> InfeasibleError:
    """The error where plans in tiles were found again and again that need more than they were planned for."""
    budget, works = plan.budget_bytes, plan.budget_bytes + missing
    return InfeasibleError(
        f"no plan in tiles fits {format_bytes(budget)} ({budget} bytes): operators around tiles need more "
        f"memory than was known when it was made; {format_bytes(works)} ({works} bytes) would do",
        budget=budget,
        smallest_budget=works,
        floor=0,
        holds_for="nothing",
    )


def has_loop(program: Program) -> bool:
    """Whether a Program is of a graph of its own, with a region as one operator."""
    return any(isinstance(line, Loop) for line in program.instructions)


def with_loop(joint: Joint, program: Program) -> Joint:
    """The captured step as the Program runs it: with a region as one operator, where it has a loop.

    A PlanError says that the step cannot be cut as the Program says.
    """
    loop = loop_of(program)
    if loop is None:
        return joint
    joint = joint.ungrouped or joint
    boxes = [tile.over for tile in loop.tiles]
    inner, own = _inner(program), _own(program)
    try:
        tiling = Tiling(joint, loop.cut, loop.end, channels_last=loop.channels_last)
        _refuse_boxes(boxes, tiling.axes)
        if own is not None:
            _refuse_boxes(own.boxes, _shape(joint, own.name))
        whole = looped(
            joint, boxes, loop.cut, loop.end, channels_last=loop.channels_last, inner=inner, own=own
        )
    except CaptureError as error:
        said = f"the step cannot be cut into the tiles of the program: {error}; plan again for this step"
        raise broken(Rule.SAME_STEP, said) from error
    compile_groups(whole, joint.kernels)
    return whole


def cut_as_it_runs(
    joint: Joint,
    program: Program,
    arguments: Sequence[Any],
    witness: Witness,
    state: Sequence[torch.Tensor] = (),
) -> Joint:
    """The captured step as a Program with loops runs it, whose tiles give what was captured of them.

    A Program that was made before is of tiles as they really lie in memory, which another process does not
    know yet. Where they are not those of the Program, a tile of each body runs before the step is cut again.
    ``state`` is that of an optimiser.
    """
    for _ in range(_CUTS):
        whole = with_loop(joint, program)
        try:
            refuse_invalid(whole, program, state)
        except PlanError:
            before = witness.learned
            watch_tiles(whole, arguments, witness)
            if witness.learned > before:
                continue
        break
    return whole


def _refuse_boxes(boxes: Sequence[Rect], axes: Sequence[int]) -> None:
    """Raise a PlanError unless the boxes cover the axes: what is cut into others cannot be captured."""
    problem = wrong_boxes(boxes, axes)
    if problem is not None:
        raise broken(Rule.TILES, f"a loop {problem}")


def _shape(joint: Joint, name: str) -> tuple[int, ...]:
    """The shape of a tensor of the step."""
    shapes = [tensor.shape for tensor in joint.graph.tensors if tensor.id == name]
    if not shapes:
        raise CaptureError(f"there is no tensor {name!r}")
    return shapes[0] or ()


def _own(program: Program) -> Owned | None:
    """Which input tiles own, where they do."""
    loops = [line for line in program.backward if isinstance(line, Loop) and line.own]
    return Owned(loops[0].own, [tile.over for tile in loops[0].tiles]) if loops else None


def _inner(program: Program) -> Inner | None:
    """The loops inside tiles as the Program has them, body after body."""
    loops = [loop_of(body.program) for body in program.bodies]
    left = iter(loops)

    def chosen(joint: Joint) -> tuple[str, list[Rect]] | None:
        loop = next(left, None)
        if loop is None:
            return None
        boxes = [tile.over for tile in loop.tiles]
        _refuse_boxes(boxes, _shape(joint, loop.end))
        return loop.end, boxes

    return chosen if any(loops) else None


def in_tiles(
    joint: Joint,
    arguments: Sequence[Any],
    room: Room,
    request: PlanRequest,
    plain: Side,
    state: Sequence[torch.Tensor] = (),
    *,
    time_limit: float | None = None,
    rival: float | None = None,
) -> Plan:
    """The fastest plan found that cuts the step into tiles; an optimiser's ``state`` counts in its peak.

    The budget of the request is in bytes. ``time_limit`` is for capturing tiles and planning with them;
    measuring them comes on top. ``rival`` is what a step takes by a plan without tiles: what cannot be found
    in time is not looked for any longer then. A CaptureError says why it cannot be cut, an InfeasibleError
    that no way to cut it fits.
    """
    joint = joint.ungrouped or joint
    least = least_bytes(with_state(joint.graph, state)) + room.outside_bytes()
    budget = request.budget.bytes or 1
    if least > budget:
        stays = "results" if joint.evaluates else "gradients"
        raise InfeasibleError(
            f"none can help: parameters, inputs and {stays} alone take {format_bytes(least)}",
            budget=budget,
            smallest_budget=least,
            floor=least,
            proven=True,
        )
    cutter = Cutter(joint, arguments, room, request)
    limit = request.limits.time_limit if time_limit is None else time_limit
    search = Search(joint, cutter, room, request, budget, plain, state, time_limit=limit, rival=rival)
    search.try_all()
    settle(search)
    if search.best is None:
        raise search.refused or InfeasibleError(
            "none is small enough", budget=budget, smallest_budget=plain.peak_bytes, floor=0, proven=False
        )
    return msgspec.structs.replace(search.best, solve_seconds=search.spent(), interrupted=search.interrupted)


def beside_tiles(request: PlanRequest) -> PlanRequest:
    """The same in the time that is for a plan without tiles, where they may be looked for beside it."""
    share = 1.0 if not request.tiles else time_shares.WHOLE_AUTO if request.auto else time_shares.WHOLE
    return request.within(share * request.limits.time_limit)


def good_without_tiles(whole: Plan, request: PlanRequest) -> Plan | None:
    """The plan without tiles where none are looked for."""
    if not request.tiles_compete:
        return whole
    if whole.interrupted:
        return without_tiles(whole, request, "not looked for, the search was interrupted")
    if whole.overhead <= (_NO_FUSED_TILES if request.kernels == "fused" else _NO_TILES):
        return without_tiles(whole, request, "not looked for, a plan without them is hardly slower")
    return None


def without_tiles(plan: Plan, request: PlanRequest, why: str) -> Plan:
    """The plan with the reason why it has no tiles, though they were allowed."""
    return msgspec.structs.replace(plan, only=request.methods, no_tiles=why)
