"""What the checker asks of a short second run: it follows a first one, and what that one saved is there."""

from __future__ import annotations

from collections.abc import Set

from lowtide.graph import Graph
from lowtide.plan.program import Run

__all__ = ["wrong_short"]


def wrong_short(graph: Graph, line: Run, again: bool, there: Set[int]) -> str | None:
    """What is wrong with a short run while these tensors are there; None where nothing is."""
    op = graph.ops[line.op]
    saved = [op.outputs[k] for k in op.attributes.get("short", ())]
    if not again or not saved or line.in_place is not None:
        return f"runs {op.label!r} from what it saved, which it cannot"
    missing = [graph.tensors[t].label for t in saved if t not in there]
    return f"{op.label!r} runs again from {missing[0]!r}, which is not there" if missing else None
