"""Unit costs, the convention of the recomputation literature: a convolution 10, anything else 1."""

from __future__ import annotations

from lowtide.graph import Graph, Phase

__all__ = ["unit_seconds"]

_CONVOLUTION = 10.0


def unit_seconds(graph: Graph) -> list[float]:
    """For every operator 10 if it is a (de)convolution, else 1; everything after forward is free."""
    return [
        0.0 if op.phase is not Phase.FORWARD else _CONVOLUTION if "conv" in op.kind.lower() else 1.0
        for op in graph.ops
    ]
