"""What operators of a step that is cut read: values, or only shapes."""

from __future__ import annotations

from lowtide.graph import Graph, Op
from lowtide.graph.access import access
from lowtide.graph.tiles import reads_of

__all__ = ["MASKED", "values_read"]

MASKED = "aten.native_dropout"
"""Draws a mask and applies it: of a step in tiles, all of the mask is drawn before."""


def values_read(graph: Graph, op: Op) -> set[int]:
    """Inputs of an operator whose values, not only shapes, are read; of a dropout only its mask counts."""
    return set() if op.kind == MASKED else reads_of(op, access(graph, op), op.outputs)
