"""Whether the tiles of a loop cover its axes, each part once, and whether loops belong together.

Serves the checker, and whoever cuts a step as a Program says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lowtide.graph import Graph, Phase, Rect
from lowtide.plan.program.instructions import Loop, Program

__all__ = ["wrong_boxes", "wrong_loop", "wrong_region"]


def wrong_loop(graph: Graph, line: Loop, bodies: int) -> str | None:
    """What is wrong with a loop by itself; None where nothing is. There are so many ``bodies``."""
    op = graph.ops[line.op]
    for tile in line.tiles:
        if not 0 <= tile.body < bodies:
            return f"turns body {tile.body}; the program has {bodies}"
    return wrong_boxes([tile.over for tile in line.tiles], op.axes)


def wrong_boxes(boxes: Sequence[Rect], axes: Sequence[int]) -> str | None:
    """What is wrong with boxes that are to cover these axes, each part once; None where nothing is."""
    size = 0
    active: list[Rect] = []
    for box in sorted(boxes):
        if len(box.lo) != len(axes) or not all(
            0 <= lo < hi <= n for lo, hi, n in zip(box.lo, box.hi, axes, strict=True)
        ):
            return f"turns for {box}, which is no part of axes of {tuple(axes)}"
        active = [other for other in active if not axes or other.hi[0] > box.lo[0]]
        for other in active:
            if all(lo < end and start < hi for (lo, hi), (start, end) in zip(box, other, strict=True)):
                return f"turns twice for what {box} and {other} share"
        active.append(box)
        size += math.prod(hi - lo for lo, hi in box)
    if not boxes:
        return f"leaves out parts of axes of {tuple(axes)}: it has no tiles"
    return None if size == math.prod(axes) else f"leaves out parts of axes of {tuple(axes)}"


def wrong_region(graph: Graph, program: Program, *, inside: bool) -> str | None:
    """Why the loops of a Program are not those of one region; None where they are. ``inside``: of a tile.

    A region that ends at the loss is one loop. One that ends before is a loop in forward and one in backward
    over the same boxes, or, where tiles own an input, one over boxes of that. An evaluation has the one in
    forward alone.
    """
    lines = [line for line in program.instructions if isinstance(line, Loop)]
    if not lines:
        return None
    loops = {line.op: line for line in lines}
    if any(line != loops[line.op] for line in lines):
        return "has two loops of one operator that differ"
    first = lines[0]
    if any((x.cut, x.end, x.channels_last) != (first.cut, first.end, first.channels_last) for x in lines):
        return "has loops of different regions: they begin, end or lie in memory differently"
    if len({tuple(tile.over for tile in line.tiles) for line in lines if not line.own}) > 1:
        return "has loops of one region over different boxes"
    if inside and (first.cut or first.channels_last or not first.end):
        return "has a loop inside of a tile that does not go from its inputs to a tensor"
    if first.end in first.cut or len(set(first.cut)) < len(first.cut):
        return f"has a loop from {first.cut} to {first.end!r}"
    forward = [line for k, line in loops.items() if graph.ops[k].phase is Phase.FORWARD]
    backward = [line for k, line in loops.items() if graph.ops[k].phase is not Phase.FORWARD]
    if len(forward) != 1 or forward[0].own:
        return f"has {len(forward)} loops in forward where a region has one that owns nothing"
    kinds = [bool(line.own) for line in backward]
    if not first.end and backward:
        return "has a loop in backward though its region ends at the loss"
    evaluates = all(op.phase is Phase.FORWARD for op in graph.ops)
    if first.end and (bool(backward) is evaluates or len(set(kinds)) < len(kinds) or (inside and any(kinds))):
        return f"has {len(backward)} loops in backward for one in forward"
    return None
