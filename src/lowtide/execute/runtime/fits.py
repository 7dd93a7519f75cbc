"""Whether a Program may run a captured step: the checker's rules, then what only torch knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.errors import PlanError
from lowtide.execute.memory.optimizer_state import with_state
from lowtide.execute.runtime.in_place import refuse_in_place
from lowtide.plan.check.checker import check
from lowtide.plan.check.rules import Rule, broken
from lowtide.plan.program.instructions import Body, Loop, Program, Run
from lowtide.plan.request import MOVABLE
from lowtide.trace.step.joint import Joint

__all__ = ["refuse_invalid"]


def refuse_invalid(
    joint: Joint, program: Program, state: Sequence[torch.Tensor] = (), *, inside: bool = False
) -> None:
    """Raise a PlanError unless the Program is valid for the step. Whatever runs has passed here.

    ``state`` is that of an optimiser, which counts behind the tensors of the step. ``inside`` says that the
    step is that of a tile.
    """
    check(with_state(joint.graph, state), program, offload=tuple(MOVABLE), inside=inside)
    _refuse_others(joint, program)


def _refuse_others(joint: Joint, program: Program) -> None:
    """Raise a PlanError for tiles captured differently, and for operators that have no form in place."""
    place = 0
    try:
        for place, line in enumerate(program.instructions):  # noqa: B007  it is told where it ended
            if isinstance(line, Loop):
                _refuse_tiles(joint.calls[line.op].target, line, program.bodies)
            elif isinstance(line, Run):
                refuse_in_place(joint, line)
    except PlanError as error:
        raise PlanError(f"instruction {place}: {error}", rule=error.rule) from error


def _refuse_tiles(region: Any, loop: Loop, bodies: Sequence[Body]) -> None:
    """Refuse a loop that is not what the step was cut into."""
    if [tile.over for tile in loop.tiles] != [tile.over for tile in region.tiles]:
        raise broken(Rule.SAME_STEP, "the loop has other tiles than the step was cut into")
    numbers = {id(joint): region.first + k for k, joint in enumerate(region.bodies)}
    seen: set[int] = set()
    for tile, planned in zip(region.tiles, loop.tiles, strict=True):
        if numbers[id(tile.joint)] != planned.body or planned.body >= len(bodies):
            raise broken(Rule.SAME_STEP, f"tile {tile.over} has body {planned.body}, which is not its own")
        if planned.body in seen:
            continue
        seen.add(planned.body)
        body = bodies[planned.body]
        if body.graph != tile.joint.graph:
            raise broken(
                Rule.SAME_STEP,
                "a tile was captured differently than it was planned for: plan again, and without tiles "
                "(only='recompute,offload') if that does not help",
            )
        _refuse_others(tile.joint, body.program)
