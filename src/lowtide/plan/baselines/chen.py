"""Square-root segments: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016).

Forward is cut into about as many segments as the square root of its operators. What crosses a cut is kept;
the inside of a segment is made again once, when backward comes to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from lowtide.graph import Graph
from lowtide.plan.baselines.common import cheapest, segmented
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simple import forward_count

__all__ = ["chen"]

_TIMES_THE_ROOT = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)


def chen(
    graph: Graph, seconds: Sequence[float], budget: int, *, workspace_bytes: Sequence[int] = ()
) -> Program:
    """The cheapest that fits among a handful of segment counts, with as many operators or bytes in each."""
    return cheapest(graph, seconds, budget, _programs(graph), workspace_bytes=workspace_bytes)


def _programs(graph: Graph) -> Iterator[Program]:
    count = forward_count(graph)
    made = [sum(graph.tensors[t].bytes for t in op.outputs) for op in graph.ops[:count]]
    wanted = {round(times * math.sqrt(count)) for times in _TIMES_THE_ROOT}
    for segments in sorted({min(max(2, one), max(count, 1)) for one in wanted}):
        for weight in ([1] * count, made):
            yield segmented(graph, _segments(weight, segments))


def _segments(weight: Sequence[int], count: int) -> list[int]:
    """A segment for each operator: about the same weight in each."""
    whole = max(sum(weight), 1)
    before = [0, *itertools.accumulate(weight)]
    return [min(count - 1, start * count // whole) for start in before[:-1]]
