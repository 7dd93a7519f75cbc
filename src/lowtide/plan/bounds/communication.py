"""What communications take at least, however a step is scheduled."""

from __future__ import annotations

from collections.abc import Collection

from lowtide.graph import Graph
from lowtide.plan.program.costs import Costs

__all__ = ["longest_chain"]


def longest_chain(graph: Graph, costs: Costs, left_out: Collection[int]) -> float:
    """Seconds of the longest chain of operators that read each other, or of all communications if longer.

    Communications go one after the other, and end before the step does. ``left_out`` are operators that need
    not run. Without communications it is 0: operators take longer one after the other.
    """
    if not costs.wire_seconds:
        return 0.0
    ready: dict[int, float] = {}
    for k, op in enumerate(graph.ops):
        own = 0.0 if k in left_out else costs.seconds[k] + costs.wire_seconds.get(k, 0.0)
        ends = max((ready.get(t, 0.0) for t in op.reads), default=0.0) + own
        for t in op.outputs:
            ready[t] = max(ready.get(t, 0.0), ends)
    return max(*ready.values(), sum(costs.wire_seconds.values()), 0.0)
