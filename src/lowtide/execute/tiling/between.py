"""Where a region of a share may be: between communications, which tiles do not run.

A region begins at what all communications give that gradients go through, so none is in it, and ends at the
loss or at what one of them takes.
"""

from __future__ import annotations

from lowtide.execute.tiling.regions import carrying
from lowtide.graph import EXCHANGE, SUM, Op, Phase
from lowtide.trace.step.joint import Joint

__all__ = ["arrivals", "departures"]

_MOST = 3
"""So many regions that end at a communication are tried."""


def arrivals(joint: Joint) -> tuple[str, ...]:
    """What communications of forward give, where gradients go through it; not the loss, which is a sum."""
    graph = joint.graph
    ops, carries = _carried(joint)
    made = [op.outputs[0] for op in ops if op.kind in (EXCHANGE, SUM) and op.outputs[0] in carries]
    return tuple(graph.tensors[t].id for t in made if graph.tensors[t].shape not in ((), (1,)))


def departures(joint: Joint) -> list[str]:
    """What they take of what the step makes; first that for which most is made since the last one."""
    graph = joint.graph
    ops, carries = _carried(joint)
    maker = {t: op for op in ops for t in op.outputs}
    found: dict[str, int] = {}
    for op in ops:
        t = op.inputs[0] if op.kind in (EXCHANGE, SUM) else -1
        if t not in maker or t not in carries or len(graph.tensors[t].shape or ()) < 2:
            continue
        region, stack = set[int](), [t]
        while stack:
            one = stack.pop()
            if one in region or one not in maker or maker[one].kind in (EXCHANGE, SUM):
                continue
            region.add(one)
            stack += maker[one].inputs
        if len({maker[one].id for one in region}) > 1:
            found[graph.tensors[t].id] = sum(graph.tensors[one].bytes for one in region - {t})
    return sorted(found, key=lambda name: -found[name])[:_MOST]


def _carried(joint: Joint) -> tuple[list[Op], set[int]]:
    """Operators of forward, and tensors that gradients go through."""
    ops = [op for op in joint.graph.ops if op.phase is Phase.FORWARD]
    return ops, carrying(joint.graph, ops, joint.leaves)
