"""Keep everything that backward reads: what eager does."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph import Graph
from lowtide.plan.baselines.common import cheapest
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simple import store_all

__all__ = ["keep_all"]


def keep_all(
    graph: Graph, seconds: Sequence[float], budget: int, *, workspace_bytes: Sequence[int] = ()
) -> Program:
    """Every operator once."""
    return cheapest(graph, seconds, budget, [store_all(graph)], workspace_bytes=workspace_bytes)
