"""What the checker asks of a short second run.

It follows a first one, and what that one saved is there; or it is part of the short run right before it,
whose result it writes over, with nothing but drops between.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from lowtide.graph import Graph
from lowtide.plan.program import Drop, Instruction, Run

__all__ = ["wrong_short"]


_PARTS = ("aten.relu", "aten.add")


def wrong_short(
    graph: Graph, line: Run, earlier: Sequence[Instruction], again: bool, there: Set[int]
) -> str | None:
    """What is wrong with a short run while these tensors are there; None where nothing is."""
    op = graph.ops[line.op]
    if again and op.kind in _PARTS:
        before = next((one for one in reversed(earlier) if not isinstance(one, Drop)), None)
        follows = isinstance(before, Run) and before.short and graph.ops[before.op].outputs[0] == op.inputs[0]
        if follows and line.in_place == 0:
            return None
        return f"runs {op.label!r} as part of a run before it, which it does not follow"
    saved = [op.outputs[k] for k in op.attributes.get("short", ())]
    if not again or not saved or line.in_place is not None:
        return f"runs {op.label!r} from what it saved, which it cannot"
    missing = [graph.tensors[t].label for t in saved if t not in there]
    return f"{op.label!r} runs again from {missing[0]!r}, which is not there" if missing else None
